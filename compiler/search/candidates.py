"""Candidates with their closed forms: pruned by memory, ranked by time, and compared choice by choice."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from titan.compiler.cost.estimate import Estimate, Estimator
from titan.compiler.schedules.registry import SCHEDULES
from titan.compiler.search.space import Space, allowed, shardings
from titan.compiler.search.stages import balance_ranks
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
KEPT = 4  # fitting candidates of which no other may be faster
NEAR = 1.1  # times the limit, by estimate: such plans are compiled too when no better one is left


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
    def key(self) -> tuple[float, int, int, int, int, int, int, bool, str, int, str]:
        """Order of preference; equal times are told apart by memory, then by the choices themselves."""
        s, e = self.strategy, self.estimate
        choices = (
            s.pipeline, s.tensor, s.context, s.micro_batch, s.zero, not s.sequence_parallel, s.context_form,
            s.context_heads, s.context_order,
        )  # fmt: skip
        return (round(e.seconds, 9), e.memory, *choices)


def price(spec: Spec, estimator: Estimator, space: Space, limit: int) -> tuple[list[Candidate], list[Candidate]]:
    """(those that fit, those that do not): candidates as they are where that fits, else the fastest of the ways to save
    memory (recompute, sharding of gradients and parameters) that fit.

    Nothing makes the body of a step faster than its bound, so strategies are looked at best bound first, until `KEPT`
    fitting ones are faster than every bound left. Of the rest, the best with each value of a choice that no fitting
    one has is looked at too, so that every choice can be compared.
    """
    bounds = sorted(((estimator.bound(s), n) for n, s in enumerate(space.candidates)))
    fitting: list[Candidate] = []
    others: list[Candidate] = []
    fastest: list[float] = []
    values: dict[str, set[Any]] = {key: set() for key in COMPARED}
    ladders: dict[tuple[int, int, int, int], list[dict[str, Any]]] = {}
    for bound, number in bounds:
        s = space.candidates[number]
        late = len(fastest) == KEPT and bound >= fastest[-1]
        if late and all(getattr(s, k) in v for k, v in values.items()):
            continue
        found = Candidate(s, estimator.estimate(s, NEAR * limit))
        if found.estimate.memory > limit and not late:
            mesh = (s.pipeline, s.data, s.context, s.tensor)
            if mesh not in ladders:
                ladders[mesh] = _savings(spec, s)
            found = _saving(estimator, found, ladders[mesh], limit)
        for key, seen in values.items():
            seen.add(getattr(s, key))
        if found.estimate.memory > limit:
            others.append(found)
            continue
        fitting.append(found)
        insort(fastest, found.estimate.seconds)
        del fastest[KEPT:]
    fitting.sort(key=lambda c: c.key)
    others.sort(key=lambda c: (c.estimate.memory, c.key))
    return fitting, others


def saved(spec: Spec, estimator: Estimator, candidate: Candidate, limit: int) -> Candidate:
    """The candidate, or the fastest of the ways to make it fit."""
    if candidate.estimate.memory <= limit:
        return candidate
    return _saving(estimator, candidate, _savings(spec, candidate.strategy), limit)


def _savings(spec: Spec, strategy: Strategy) -> list[dict[str, Any]]:
    """Changes that may make a candidate fit, the thriftiest last."""
    options, tiers = shardings(spec, strategy), allowed(spec, "recompute")
    return [{**option, "recompute": tier} for tier in tiers for option in options][1:]


def _saving(estimator: Estimator, whole: Candidate, changes: list[dict[str, Any]], limit: int) -> Candidate:
    """The fastest change that fits, else the smallest. The thriftiest is looked at first: where not even that fits, no
    other does."""
    if not changes:
        return whole
    tried = [_changed(estimator, whole, changes[-1], limit)]
    if tried[0].estimate.memory <= NEAR * limit:
        tried += [_changed(estimator, whole, change, limit) for change in changes[:-1]]
    fitting = [c for c in tried if c.estimate.memory <= limit]
    return min(fitting, key=lambda c: c.key) if fitting else min((whole, *tried), key=lambda c: c.estimate.memory)


def _changed(estimator: Estimator, whole: Candidate, change: dict[str, Any], limit: int) -> Candidate:
    strategy = replace(whole.strategy, **change)
    return Candidate(strategy, estimator.estimate(strategy, NEAR * limit))


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
    split = balance_ranks(costs, places, 0.0, ends, most) or balance_ranks(costs, places, 0.0, ends)
    assert split is not None  # legality: there are no more stages than layers
    return replace(s, stages=split)


def places_of(s: Strategy) -> tuple[int, ...]:
    """Where the chunks of one copy lie: ranks, or with two copies the lower of the two ranks that hold the stage."""
    row = SCHEDULES[s.schedule]
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
