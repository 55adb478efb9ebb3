"""Candidates with their closed forms: pruned by memory, ranked by time, and compared choice by choice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from titan.compiler.cost.estimate import Estimate, Estimator
from titan.compiler.schedules.registry import SCHEDULES
from titan.compiler.search.space import Space, allowed
from titan.compiler.search.stages import balance_ranks
from titan.compiler.strategy import Strategy

if TYPE_CHECKING:
    from titan.compiler.spec.schema import Spec


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
        return 2 * s.pipeline * s.micro_batches + 20 * self.estimate.stage * s.pipeline

    @property
    def key(self) -> tuple[float, int, int, int, int, int, int, bool, str, int]:
        """Order of preference; equal times are told apart by memory, then by the choices themselves."""
        s, e = self.strategy, self.estimate
        choices = (
            s.pipeline, s.tensor, s.context, s.micro_batch, s.zero, not s.sequence_parallel, s.context_form,
            s.context_heads,
        )  # fmt: skip
        return (round(e.seconds, 9), e.memory, *choices)


def price(spec: Spec, estimator: Estimator, space: Space, limit: int) -> tuple[list[Candidate], list[Candidate]]:
    """(those that fit, those that do not): each candidate recomputes only where it would not fit otherwise."""
    fitting: list[Candidate] = []
    others: list[Candidate] = []
    tiers = allowed(spec, "recompute")
    for strategy in space.candidates:
        for tier in tiers:
            tried = strategy if tier == strategy.recompute else _with_recompute(strategy, tier)
            found = Candidate(tried, estimator.estimate(tried, NEAR * limit))
            if found.estimate.memory <= limit:
                fitting.append(found)
                break
        else:
            others.append(found)
    fitting.sort(key=lambda c: c.key)
    others.sort(key=lambda c: (c.estimate.memory, c.key))
    return fitting, others


def _with_recompute(s: Strategy, tier: str) -> Strategy:
    """`dataclasses.replace`, which is slow, by hand: this runs for most of the space."""
    return Strategy(
        s.region, s.pipeline, s.data, s.context, s.tensor, s.sequence_parallel, s.context_form,
        s.zero, s.schedule, tier, s.micro_batch, s.micro_batches, s.stages, written_order=s.written_order,
        wished_chunks=s.wished_chunks, context_heads=s.context_heads, context_order=s.context_order,
    )  # fmt: skip


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
    one = layer.forward + layer.backward + (layer.forward if s.recompute == "full" else 0.0)
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
