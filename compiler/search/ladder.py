"""Ways to make a candidate fit: it is sharded and recomputed more and more, until the fastest that fits is known."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from titan.compiler.cost.estimate import Estimate, Estimator
from titan.compiler.plan.frozen import dataclass
from titan.compiler.search.space import EXPERT_RULES, Shardings, Ways, allowed
from titan.compiler.spec.legality import is_legal
from titan.compiler.strategy import Strategy

if TYPE_CHECKING:
    from titan.compiler.spec.schema import Spec

FEW = 2  # layers of a rank
NEAR = 1.1  # times the limit, by estimate: such plans are compiled too when no better one is left


@dataclass(frozen=True, slots=True)
class Ladder:
    """Ways to shard that may make a candidate fit, the thriftiest last. Where a rank holds few layers, whole buckets
    may be as large as all that is sharded, and others the `thrifty` ones."""

    spec: Spec
    options: Ways
    thrifty: tuple[dict[str, Any], ...]

    def try_tier(self, estimator: Estimator, s: Strategy, tier: str, limit: int) -> list[tuple[Strategy, Estimate]]:
        """A strategy with a tier and every sharding, the thriftiest first; only that where not even it fits. Left out
        is what does not go with the strategy's experts, what only saves more than another one that fits, and what only
        holds more than another one that does not: the fastest comes after one that fits, the thriftiest after one that
        does not, so that most is known of those between them."""
        ways, left = self.options, deque(range(len(self.options)))
        if s.expert > 1:
            left = deque(n for n in left if is_legal(self.spec, s.but(**ways[n]), EXPERT_RULES))
        priced = estimator.alike(s.but(recompute=tier), NEAR * limit)
        holds, saves = ways.holds, ways.saves[s.micro_batches > 1]
        found: dict[int, tuple[Strategy, Estimate]] = {}
        larger = slower = 0
        fits = False
        while left:
            number = left.popleft() if fits else left.pop()
            if (larger | slower) >> number & 1:
                continue
            one = found[number] = priced(ways[number])
            fits = one[1].memory <= limit
            if fits:
                slower |= saves[number] & ~(1 << number)
            else:
                larger |= holds[number]
                if len(found) == 1 == len(self.thrifty):
                    break
        return [one for number, one in found.items() if not slower >> number & 1]


class Ladders:
    """Those of the meshes of one spec, and its tiers of recompute, the thriftiest last; meshes that are alike share
    what is known about their ways to shard."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self.tiers = spec, allowed(spec, "recompute")
        self._shardings = Shardings(spec)
        self._known: dict[tuple[int, int, int, int], Ladder] = {}

    def of(self, s: Strategy) -> Ladder:
        """Of the mesh of a strategy."""
        mesh = (s.pipeline, s.data, s.context, s.tensor)
        found = self._known.get(mesh)
        if found is None:
            options = self._shardings.of(s)
            thrifty = options[-1:] if self.spec.model.layer_count > FEW * s.pipeline else _thrifty(options)
            found = self._known[mesh] = Ladder(self.spec, options, thrifty)
        return found


def _thrifty(options: Ways) -> tuple[dict[str, Any], ...]:
    """Of which any may hold least where ranks have few layers."""
    least = options[-1].get("prefetch")
    fetched = (o for o in options[1:-1] if o.get("gather") == "each" and o.get("prefetch") == least)
    return (options[0], *fetched, options[-1])
