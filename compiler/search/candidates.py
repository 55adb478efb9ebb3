"""Candidates with their closed forms: pruned by memory, ranked by time, and compared choice by choice."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from heapq import heapify, heappop, heappush
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from titan.compiler.cost.estimate import Estimate, Estimator
from titan.compiler.plan.frozen import dataclass
from titan.compiler.schedules.registry import schedule_row
from titan.compiler.search.hopes import Hopes
from titan.compiler.search.ladder import NEAR, Ladders
from titan.compiler.search.loss import SHARE
from titan.compiler.search.space import Family, Space
from titan.compiler.search.stages import balance_ranks
from titan.compiler.shared_work import SharedWork
from titan.compiler.strategy import Strategy

if TYPE_CHECKING:
    from titan.compiler.spec.schema import Spec


COMPARED = (
    "pipeline",
    "data",
    "context",
    "tensor",
    "sequence_parallel",
    "context_form",
    "context_heads",
    "context_order",
    "micro_batch",
)
LARGE = 12_000  # block calls above which a plan must be faster by a margin
KEPT = 2  # fitting candidates of which no other may be faster
HALVED = 256  # families from which on they are searched in two halves


@dataclass(frozen=True, slots=True)
class Candidate:
    """A strategy with its closed forms."""

    strategy: Strategy
    estimate: Estimate

    @property
    def work(self) -> int:
        """Block calls of the plan and a share for its blocks: what compiling and proving it costs."""
        s = self.strategy
        return 2 * s.pipeline * s.micro_batches * s.chunks + 20 * self.estimate.stage * s.pipeline

    @property
    def written(self) -> int:
        """Instructions of the forwards that are written one by one: every hop of a ring is as long as a layer without
        one, and of the layers of a chunk some stand for all that are alike. Where they do not, all are written, and
        twice: alone and in a pair, or for each tier."""
        from titan.compiler.passes.repeat import written

        s, layers = self.strategy, -(-self.estimate.stage // self.strategy.chunks)
        hops = s.context // s.context_heads if s.context_form == "ring" else 1
        most = written(s)
        layers = 2 * layers if most is None else min(layers, most)
        return 20 * s.pipeline * s.order.copies * s.chunks * layers * hops

    @property
    def key(self) -> tuple[float, int, int, int, int, int, int, bool, str, int, str]:
        """Order of preference; equal times are told apart by memory, then by the choices themselves."""
        s, e = self.strategy, self.estimate
        choices = (
            s.pipeline, s.tensor, s.context, s.micro_batch, s.zero, not s.sequence_parallel, s.context_form,
            s.context_heads, s.context_order,
        )  # fmt: skip
        return (round(e.seconds, 9), e.memory, *choices)


@dataclass(frozen=True, slots=True)
class Priced:
    """`fitting` and `others` (those that do not fit) in order of preference; `number` counts what was given a price."""

    fitting: list[Candidate]
    others: list[Candidate]
    number: int


def price(spec: Spec, estimator: Estimator, space: Space, limit: int) -> Priced:
    """Branch and bound over the space: candidates as they are where that fits, else the fastest of the ways to save
    memory (recompute, sharding of gradients and parameters) that fit.

    Micro-batches of a family that do not fit when everything is done to save memory are cut off with all larger ones.
    Nothing makes the body of a step faster than its bound, so the others are looked at best bound first, until `KEPT`
    fitting ones are faster than every bound left. A bound is at first one over all ways to share experts, with the tier
    that may fit first; what does not fit so goes back into the queue with what it must recompute.
    Of the rest, the best with another value of a choice that has only one so far is looked for too, so that every
    choice can be compared. A large space is searched in two halves, each of which has the fastest of its own.
    """
    families = space.families
    halves = (families[::2], families[1::2]) if len(families) >= HALVED else (families,)
    jobs = {str(k): partial(_hunted, spec, estimator, half, limit) for k, half in enumerate(halves)}
    hunted = SharedWork(jobs, pays=len(halves) > 1).finish().values()
    fitting = sorted((c for found in hunted for c in found.fitting), key=lambda c: c.key)
    others = sorted((c for found in hunted for c in found.others), key=lambda c: (c.estimate.memory, c.key))
    return Priced(fitting, others, sum(found.number for found in hunted))


def _hunted(spec: Spec, estimator: Estimator, families: tuple[Family, ...], limit: int) -> Priced:
    """What a branch and bound over these families finds, in no order."""
    hunt = _Hunt(spec, estimator, limit)
    for family in families:
        hunt.enter(family)
    hunt.run()
    hunt.compare()
    return Priced(list(hunt.found.values()), list(hunt.others.values()), hunt.priced)


class _Entry(NamedTuple):
    """A branch: a family, one of its micro-batches with those ways to share experts that are left, or a strategy from a
    tier of recompute on. `bound`: seconds that nothing in it gets below."""

    bound: float
    order: int
    base: int
    strategy: Strategy  # of a family, or of a batch without a bound of its own: what all batches have in common
    tier: int
    family: Family | None = None
    number: int = -1  # of a batch of the family; -1: all
    way: int = 0  # of a batch with several ways to share experts the next one, in order of their exchanges
    floors: Sequence[float] = ()  # seconds that each batch of a family does not get below
    own: bool = True  # whether the bound of a batch is its own, not its family's


class _Hunt:
    """The queue of a branch and bound, and what it has found."""

    def __init__(self, spec: Spec, estimator: Estimator, limit: int) -> None:
        self.spec, self.estimator, self.limit = spec, estimator, limit
        self.found: dict[int, Candidate] = {}
        self.others: dict[int, Candidate] = {}
        self.fastest: list[tuple[float, int]] = []
        self.queue: list[_Entry] = []
        self.ladders = Ladders(spec)
        self.tiers = self.ladders.tiers
        self.priced = 0
        self.hopes = Hopes(spec, estimator, limit)
        # logits formed in pieces hold less than those that are kept, so the next micro-batch may hold as much less
        self.dip = estimator.machine.memory * SHARE

    def enter(self, family: Family) -> None:
        """Queue a family by what its largest micro-batch takes per sequence: no smaller one takes less."""
        s, batches = family.plain, family.batches
        p, whole = s.pipeline, s.micro_batch * s.micro_batches
        fills = [b.size * self.hopes.left(p, whole // b.size) for b in batches] if p > 1 else [0.0] * len(batches)
        floors = self.estimator.floors(s, batches[-1].size, fills)
        self.priced += 1
        heappush(self.queue, _Entry(min(floors), self.priced, 0, s, 0, family, floors=floors))

    def _open(self, entry: _Entry, family: Family) -> None:
        """Queue the micro-batches of a family that can fit, by its floors: few of them need bounds of their own."""
        smallest = self._least(family, 0, len(self.tiers) - 1)
        if smallest.estimate.memory > NEAR * self.limit:
            self.others[-self.priced] = smallest
        for number, tier in enumerate(self._firsts(family, smallest.estimate.memory)):
            self.priced += 1
            floor, order = entry.floors[number], self.priced
            heappush(self.queue, _Entry(floor, order, order, family.plain, tier, family, number, own=False))

    def _bind(self, entry: _Entry, family: Family) -> None:
        """Queue a micro-batch of a family by its own bound."""
        s, several = family.member(entry.number, family.experts[0]), len(family.experts) > 1
        within = (family, entry.number) if several else ()
        bound = self._bound(s, entry.tier, several)
        heappush(self.queue, _Entry(bound, entry.order, entry.base, s, entry.tier, *within))

    def _firsts(self, family: Family, least: int) -> list[int]:
        """Of the micro-batches of a family that can fit the first tier that each may fit with: where one stands for
        several ways to share experts; others are tried at once. `least`: bytes of the smallest with the last tier."""
        last = len(self.tiers) - 1
        found = [last] * self._number(family, last, least, len(family.batches))
        if len(family.experts) == 1:
            return [0] * len(found)
        number = len(found)
        for tier in range(last - 1, -1, -1):
            number = number and self._number(family, tier, self._held(family, tier, 0), number)
            found[:number] = [tier] * number
        return found

    def _held(self, family: Family, tier: int, number: int) -> int:
        """Bytes of a micro-batch with a tier, at least."""
        return self._least(family, number, tier).estimate.memory

    def _number(self, family: Family, tier: int, least: int, number: int) -> int:
        """How many of the first micro-batches of a family can fit with a tier; the smallest holds `least` bytes."""
        most, held = NEAR * self.limit + self.dip, partial(self._held, family, tier)
        if least > most:
            return 0
        if number == 1 or held(number - 1) <= most:
            return number
        return bisect_right(range(number - 1), most, 1, key=held)

    def _least(self, family: Family, number: int, tier: int) -> Candidate:
        """The thriftiest way to share and to shard with a tier of recompute."""
        plain = {"recompute": self.tiers[tier]}
        changes = [{**option, **plain} for option in self.ladders.of(family.plain).thrifty]
        tried = [family.member(number, experts, **c) for experts in family.thriftiest for c in changes]
        self.priced += len(tried)
        found = [Candidate(s, self.estimator.estimate(s, 0)) for s in tried]
        return found[0] if len(found) == 1 else min(found, key=lambda c: (c.estimate.memory, c.key))

    def _push(self, s: Strategy, tier: int, within: tuple[Family, int] | tuple[()] = (), base: int = 0) -> None:
        self.priced += 1
        bound = self._bound(s, tier, bool(within))
        heappush(self.queue, _Entry(bound, self.priced, base or self.priced, s, tier, *within))

    def _bound(self, s: Strategy, tier: int, open_experts: bool, exchange: float = 0.0) -> float:
        fill = self.hopes.left(s.pipeline, s.micro_batches)
        if open_experts:
            return self.estimator.open_bound(s, self.tiers[tier], fill, exchange)
        return self.estimator.bound(s, self.tiers[tier], fill)

    def run(self, kept: int = KEPT, skip: Callable[[_Entry], bool] | None = None) -> None:
        """Look at what is left, best bound first, until `kept` are faster than it can be."""
        while self.queue and not (len(self.fastest) >= kept and self.queue[0].bound >= self.fastest[kept - 1][0]):
            entry = heappop(self.queue)
            if skip is not None and skip(entry):
                continue
            if entry.family is None:
                self._try(entry)
            elif entry.number < 0:
                self._open(entry, entry.family)
            elif not entry.own:
                self._bind(entry, entry.family)
            else:
                self._branch(entry, entry.family)

    def _branch(self, entry: _Entry, family: Family) -> None:
        """Queue the next way to share the experts of one micro-batch size, with the first tier that can fit, and the
        others by a bound with the shortest exchange among them: few of them need bounds of their own."""
        s, tier, way = entry.strategy, entry.tier, entry.way
        if way == 0 and tier < len(self.tiers) - 1 and self._held(family, tier, entry.number) > NEAR * self.limit:
            self._push(s, tier + 1, (family, entry.number))
            return
        ways = self.estimator.exchanges(s, family.experts)
        _, expert, width = ways[way]
        self._push(s.but(expert=expert, expert_tensor=width), tier)
        if way + 1 < len(ways):
            bound = self._bound(s, tier, True, ways[way + 1][0])
            heappush(self.queue, entry._replace(bound=bound, way=way + 1))

    def _try(self, entry: _Entry) -> None:
        """The fastest sharding that fits with the entry's tier; what recomputes more is queued again."""
        s, tier, ladder = entry.strategy, self.tiers[entry.tier], self.ladders.of(entry.strategy)
        tried = tuple(Candidate(*found) for found in ladder.try_tier(self.estimator, s, tier, self.limit))
        self.priced += len(tried)
        fitting = [c for c in tried if c.estimate.memory <= self.limit]
        if fitting:
            self._keep(entry.base, min(fitting, key=lambda c: c.key))
        elif entry.base not in self.found:
            known = (self.others[entry.base],) if entry.base in self.others else ()
            self.others[entry.base] = min((*known, *tried), key=lambda c: c.estimate.memory)
        # where what saves least fits, recompute would only cost time
        whole = any(c.strategy.zero == ladder.options[0]["zero"] for c in fitting)
        if not whole and entry.tier + 1 < len(self.tiers):
            self._push(s, entry.tier + 1, (), entry.base)

    def _keep(self, base: int, candidate: Candidate) -> None:
        """A candidate that fits, in place of a slower one that differs in its savings only."""
        if base in self.found and self.found[base].key <= candidate.key:
            return
        self.others.pop(base, None)
        self.found[base] = candidate
        self.fastest = [f for f in self.fastest if f[1] != base]
        enough = self.fastest[KEPT - 1][0] if len(self.fastest) >= KEPT else inf
        insort(self.fastest, (self.hopes.soonest(candidate.strategy, candidate.estimate, enough), base))
        del self.fastest[KEPT:]

    def compare(self) -> None:
        """Look for the best with another value of a choice that all fitting ones share."""
        rest = self.queue
        for key in COMPARED:
            values = {getattr(c.strategy, key) for c in self.found.values()}
            if len(values) == 1:
                same = partial(_has, key, values.pop())
                self.fastest, self.queue = [], [entry for entry in rest if not same(entry)]
                heapify(self.queue)
                self.run(1, same)


def _has(key: str, value: object, entry: _Entry) -> bool:
    """Whether all of a branch has the value of a choice."""
    if key == "micro_batch" and entry.family is not None:
        return entry.number >= 0 and entry.family.batches[entry.number].size == value
    return bool(getattr(entry.strategy, key) == value)


def saved(ladders: Ladders, estimator: Estimator, candidate: Candidate, limit: int, enough: float = inf) -> Candidate:
    """The candidate, or the fastest of the ways to make it fit, else the smallest; ways that take `enough` seconds or
    more are not looked for."""
    if candidate.estimate.memory <= limit:
        return candidate
    ladder = ladders.of(candidate.strategy)
    best, smallest = None, candidate
    for tier in ladders.tiers:
        if estimator.bound(candidate.strategy, tier) >= (best.estimate.seconds if best else enough):
            break
        tried = tuple(Candidate(*found) for found in ladder.try_tier(estimator, candidate.strategy, tier, limit))
        fitting = [c for c in tried if c.estimate.memory <= limit]
        best = min((*fitting, *([best] if best else [])), key=lambda c: c.key, default=None)
        smallest = min((smallest, *tried), key=lambda c: c.estimate.memory)
    return best or smallest


def with_stages(candidate: Candidate, estimator: Estimator, limit: int) -> Strategy:
    """The strategy with its layers split exactly: the slowest stage as fast as can be, each within its memory."""
    s = candidate.strategy
    if s.stages:
        return s
    layers = estimator.shape.layers
    if s.pipeline == 1:
        return replace(s, stages=(layers,))
    cut = estimator.cut(s)
    layer, head = estimator.layer(cut), estimator.head(cut)
    one = layer.forward + layer.backward + layer.rebuilt(s.recompute)
    costs = tuple(one * weight for weight in estimator.shape.weights)
    ends = head.forward + head.backward
    most = estimator.most_layers(s, limit)
    places = places_of(s)
    most = tuple(most[p] for p in sorted(set(places)))
    even = (-(-layers // len(most)),) * len(most)  # where memory leaves no room to balance time
    splits = (balance_ranks(costs, places, 0.0, ends, bounds) for bounds in (most, even, ()))
    split = next(split for split in splits if split is not None)  # legality: there are no more stages than layers
    return replace(s, stages=split)


def places_of(s: Strategy) -> tuple[int, ...]:
    """Where the chunks of one copy lie: ranks, or with two copies the lower of the two ranks that hold the stage."""
    row = schedule_row(s.schedule)
    held = row.place(s.pipeline, s.chunks)
    number = len(held) // row.copies
    return tuple(min(held[c + copy * number] for copy in range(row.copies)) for c in range(number))


def affordable(candidates: Iterable[Candidate], most: int, margin: float) -> tuple[list[Candidate], float]:
    """Candidates without those whose plan is larger than `most`, unless only such come near the best: a large plan must
    be faster by `margin` to be worth it. Also the share by which the best one left out is faster."""
    ranked = list(candidates)
    small = [c for c in ranked if c.work <= most]
    if not small or not ranked:
        return ranked, 0.0
    lost = small[0].estimate.seconds / ranked[0].estimate.seconds - 1.0
    return (small, max(lost, 0.0)) if lost <= margin else (ranked, 0.0)
