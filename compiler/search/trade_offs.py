"""The table of trade-offs: plans of which none is better than another in everything (the Pareto front).

The epsilon-constraint method: on every part of the cluster the fastest plan, then the fastest in less and less memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan.compiler.search.goal import Choice, broken, hopeless, within
from titan.compiler.search.search import memory_limit, search
from titan.compiler.spec.devices import ladder

if TYPE_CHECKING:
    from titan.compiler.spec.schema import Spec

STEP = 0.75  # share of a plan's memory that its neighbour may use
LESS = 3  # plans on one part of the cluster


def trade_offs(spec: Spec) -> tuple[Choice, ...]:
    """Plans within the limits of which none is better in devices, step time and memory at once, most devices first.
    Cost per token is devices x step time, so none is better in cost either.

    Raises TitanError as the search does where no plan fits any part of the cluster.
    """
    found: list[Choice] = []
    sizes = ladder(spec)
    for part in sizes:
        choice = None if hopeless(part) else within(part, memory_limit(part))
        for _ in range(LESS):
            if choice is None or broken(choice):
                break
            found.append(choice)
            choice = within(part, round(STEP * choice.result.ledger.upper))
    kept = [c for c in found if not any(_dominates(other, c) for other in found)]
    if not kept:
        kept = [Choice(sizes[0], search(sizes[0]))]
    return tuple(sorted(kept, key=lambda c: (-c.devices, c.seconds)))


def _dominates(one: Choice, other: Choice) -> bool:
    """No worse in anything and better in something."""
    mine, its = ((c.devices, c.seconds, c.memory) for c in (one, other))
    return mine != its and all(a <= b for a, b in zip(mine, its))
