"""What a pipeline may gain by another schedule than 1F1B, which stands for all of them while meshes are searched.

How much of 1F1B's fill a schedule leaves follows from the numbers of ranks and micro-batches, about: more than the best
one saves is not hoped for. Where that is worth it, schedules get their closed forms, with the candidate's own savings.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from titan.compiler.cost.estimate import Estimate, Estimator
from titan.compiler.schedules.order import Times
from titan.compiler.schedules.registry import schedule_row
from titan.compiler.search.space import schedules
from titan.compiler.strategy import Strategy

if TYPE_CHECKING:
    from titan.compiler.spec.schema import Spec

EVEN = Times(1.0, 1.0, 1.0)
ABOUT = 1.04  # by which the closed form of a split backward's memory may be too high: plans are measured afterwards


class Hopes:
    """Of the pipelines of one spec within a limit in bytes."""

    def __init__(self, spec: Spec, estimator: Estimator, limit: int) -> None:
        self.spec, self.estimator, self.limit = spec, estimator, limit
        self.rows, self.left = cache(self._rows), cache(self._left)

    def _rows(self, pipeline: int, micro_batches: int) -> tuple[tuple[float, str, int], ...]:
        """Schedules with their chunks, by the share of 1F1B's fill that they leave, the least first."""
        if pipeline == 1:
            return ()
        whole = EVEN.total * (pipeline - 1)
        rows = schedules(self.spec, pipeline, micro_batches)
        return tuple(sorted((schedule_row(name).bubble(pipeline, EVEN, n) / whole, name, n) for name, n in rows))

    def _left(self, pipeline: int, micro_batches: int) -> float:
        """The share of 1F1B's fill that the best schedule leaves which the wishes allow."""
        return next((share for share, _, _ in self.rows(pipeline, micro_batches)), 1.0)

    def seconds(self, s: Strategy, e: Estimate) -> float:
        """With the schedule that leaves the least."""
        return e.seconds - (1 - self.left(s.pipeline, s.micro_batches)) * e.fill if e.fill else e.seconds

    def soonest(self, s: Strategy, e: Estimate, enough: float) -> float:
        """By closed form, with the first schedule that fits beside the strategy's own savings; as hoped where that is
        not below `enough`."""
        hoped = self.seconds(s, e)
        if hoped >= enough or not e.fill:
            return hoped
        for _, name, chunks in self.rows(s.pipeline, s.micro_batches):
            if name == s.schedule:
                break
            if name != "solved":
                found = self.estimator.estimate(scheduled(self.spec, s, name, chunks), room(self.limit, name))
                if found.seconds < e.seconds:
                    return found.seconds
        return e.seconds


def scheduled(spec: Spec, s: Strategy, name: str, chunks: int) -> Strategy:
    """The strategy with another schedule, its layers yet to be split."""
    changed = s.but(schedule=name, wished_chunks=chunks, stages=spec.parallel.stages.value or ())
    if schedule_row(name).copies > 1 and changed.zero == 0 and spec.parallel.zero.allows(1):
        return changed.but(zero=1)  # mirrored stages share their state, even on one data rank
    return changed


def room(limit: int, name: str) -> int:
    """Bytes that a plan with a schedule may hold by closed form."""
    return round(limit * (ABOUT if schedule_row(name).splits else 1.0))
