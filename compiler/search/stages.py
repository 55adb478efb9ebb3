"""Layers to pipeline stages: the exact split that makes the slowest stage fastest, with embedding and head counted.

A stage is a run of layers, so taking more layers into a stage never makes a later one worse: for a given bound greedy
filling decides feasibility, and the smallest feasible bound is found among the sums that runs of layers can have.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def balance(
    costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0, most: Sequence[int] = ()
) -> tuple[int, ...] | None:
    """Layers of each stage such that the largest sum of `costs` per stage is smallest; `first` and `last` are the costs
    of embedding and head, `most[s]` bounds the layers of stage s (memory). Every stage gets a layer.

    None when the layers do not fit under `most`. Of equal splits the earliest stages get the fewest layers: they hold
    the most micro-batches.
    """
    if stages < 1 or len(costs) < stages:
        return None
    bounds = tuple(most) or (len(costs),) * stages
    sums = [0.0, *accumulate(costs)]
    if _fill(sums, stages, first, last, bounds, float("inf")) is None:
        return None
    low, high = 0.0, sums[-1] + first + last
    for _ in range(60):
        middle = (low + high) / 2
        if _fill(sums, stages, first, last, bounds, middle) is None:
            low = middle
        else:
            high = middle
    return _fill(sums, stages, first, last, bounds, high)


def _fill(
    sums: Sequence[float], stages: int, first: float, last: float, most: Sequence[int], bound: float
) -> tuple[int, ...] | None:
    """From the last stage to the first, each as full as bound and memory allow; None when layers are left over."""
    end, found = len(sums) - 1, []
    for stage in range(stages - 1, -1, -1):
        room = bound - (first if stage == 0 else 0.0) - (last if stage == stages - 1 else 0.0)
        taken = 0
        while taken < most[stage] and end - taken > stage and sums[end] - sums[end - taken - 1] <= room:
            taken += 1
        if taken < 1:
            return None
        end -= taken
        found.append(taken)
    return tuple(reversed(found)) if end == 0 else None
