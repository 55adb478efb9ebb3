"""Ways to make a candidate fit: it is sharded and recomputed more and more, until the fastest that fits is known."""

from __future__ import annotations

from collections import deque
from dataclasses import field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from titan.compiler.cost.estimate import Estimate, Estimator
from titan.compiler.plan.frozen import dataclass
from titan.compiler.search.space import EXPERT_RULES, Shardings, Ways, allowed
from titan.compiler.spec.legality import is_legal
from titan.compiler.strategy import Strategy

if TYPE_CHECKING:
    from titan.compiler.spec.schema import Spec

FEW = 2  # layers of a rank
NEAR = 1.1  # times the limit, by estimate: such plans are compiled too when no better one is left

# what decides, on one mesh, which ways go with a strategy and what state they leave
_STATE = attrgetter("expert", "expert_tensor", "sequence_parallel", "schedule", "late_check", "offload")


class Tried(NamedTuple):
    """What was tried of a strategy with a tier, and whether more recompute may be worth it: of the ways that do not fit
    some may then, and what fits already would only take longer."""

    found: list[tuple[Strategy, Estimate]]
    more: bool


class _Asked(NamedTuple):
    """Ways of a ladder that are worth trying, from fast to thrifty, and those of them whose state alone fits: bit n
    stands for the n-th."""

    ways: tuple[int, ...]
    hopeful: int


@dataclass(frozen=True, slots=True)
class Ladder:
    """Ways to shard that may make a candidate fit, the thriftiest last. Where a rank holds few layers, whole buckets
    may be as large as all that is sharded, and others the `thrifty` ones."""

    spec: Spec
    options: Ways
    thrifty: tuple[dict[str, Any], ...]
    known: dict[tuple[Any, ...], _Asked] = field(default_factory=dict)

    def try_tier(self, estimator: Estimator, s: Strategy, tier: str, limit: int) -> Tried:
        """A strategy with a tier and every sharding, the thriftiest first; only that where not even it fits. Left out
        is what does not go with the strategy's experts, what no tier makes fit, what only saves more than another one
        that fits, and what only holds more than another one that does not: the fastest comes after one that fits, the
        thriftiest after one that does not, so that most is known of those between them."""
        ways, (asked, hopeful) = self.options, self._asked(estimator, s, limit)
        left = deque(asked)
        priced = estimator.alike(s.but(recompute=tier), NEAR * limit)
        holds, saves = ways.holds, ways.saves[s.micro_batches > 1]
        found: dict[int, tuple[Strategy, Estimate]] = {}
        fitting = larger = slower = 0
        while left:
            number = left.popleft() if fitting else left.pop()
            if (larger | slower) >> number & 1:
                continue
            one = found[number] = priced(ways[number])
            if one[1].memory <= limit:
                fitting |= 1 << number
                slower |= saves[number] & ~(1 << number)
            else:
                larger |= holds[number]
                if len(found) == 1 == len(self.thrifty):
                    break
        kept = [one for number, one in found.items() if not slower >> number & 1]
        return Tried(kept, bool(hopeful & ~fitting & ~slower))

    def _asked(self, estimator: Estimator, s: Strategy, limit: int) -> _Asked:
        """Worked out once for all micro-batches and tiers."""
        key = (limit, *_STATE(s))
        found = self.known.get(key)
        if found is None:
            legal = [n for n, way in enumerate(self.options) if s.expert == 1 or self._is_legal(s.but(**way))]
            fit = [n for n in legal if estimator.state_alone(s.but(**self.options[n])) <= limit]
            least = {*legal[-1:], *(n for n in legal if self.options[n] in self.thrifty)}  # ask how near these come
            found = self.known[key] = _Asked(tuple(sorted({*fit, *least})), sum(1 << n for n in fit))
        return found

    def _is_legal(self, s: Strategy) -> bool:
        return is_legal(self.spec, s, EXPERT_RULES)


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
