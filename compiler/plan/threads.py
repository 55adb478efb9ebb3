"""An order as each micro-batch meets it: its threads.

Most micro-batches of a role meet the same blocks in the same order: they are of one kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from titan.compiler.plan.program import BlockCall, Role

Met = str | tuple[str, int]  # a block, and of one with several parameters which of them is the micro-batch


class Threads(NamedTuple):
    """`kinds`: what micro-batches meet, in turn; `batches`: the number of its kind by micro-batch; `given`: (block, how
    many micro-batches it is called with); `apart`: whether no call has one micro-batch twice."""

    kinds: list[tuple[Met, ...]]
    batches: dict[int, int]
    given: set[tuple[str, int]]
    apart: bool


def threads(role: Role) -> dict[str, Threads]:
    """Every order of a role taken apart; what one begins with once."""
    found: dict[str, Threads] = {}
    going: dict[str, _Apart] = {}
    for name, before in role.legs:
        apart = going[name] = going.get(before) or _Apart()
        apart.add(role.order(name)[len(role.order(before)) if before else 0 :])
        found[name] = apart.threads()
    return found


class _Apart:
    """Calls taken apart, as far as they were added."""

    def __init__(self) -> None:
        self.met: defaultdict[int, list[Met]] = defaultdict(list)
        self.given: set[tuple[str, int]] = set()  # of calls with one micro-batch `met` says it
        self.apart = True

    def add(self, calls: Sequence[BlockCall]) -> None:
        """Goes on by some calls."""
        met = self.met
        for block, arguments in calls:
            if len(arguments) == 1:
                met[arguments[0]].append(block)
                continue
            self.given.add((block, len(arguments)))
            self.apart = self.apart and len({*arguments}) == len(arguments)
            for place, argument in enumerate(arguments):
                met[argument].append((block, place))

    def threads(self) -> Threads:
        """What there is so far."""
        numbers: dict[tuple[Met, ...], int] = {}
        batches = {batch: numbers.setdefault(tuple(thread), len(numbers)) for batch, thread in self.met.items()}
        single = {(met, 1) for kind in numbers for met in kind if isinstance(met, str)}
        return Threads(list(numbers), batches, self.given | single, self.apart)


def legs(roles: Sequence[Role]) -> list[tuple[str, str]]:
    """The orders of roles, each with the longest one that it begins with in all of them ("": there is none) and that no
    other one goes on from; that one stands before it. So what both have in common need be walked but once."""
    names = [name for name, _ in roles[0].orders]
    taken: set[str] = set()
    found: list[tuple[str, str]] = []
    for name in sorted(names, key=lambda name: len(roles[0].order(name))):
        begun = [other for other, _ in found if other not in taken and _begins(roles, name, other)]
        taken.update(begun[-1:])
        found.append((name, begun[-1] if begun else ""))
    return found


def _begins(roles: Sequence[Role], name: str, other: str) -> bool:
    orders = ((role.order(name), role.order(other)) for role in roles)
    return all(len(few) < len(calls) and calls[: len(few)] == few for calls, few in orders)
