"""Layers to pipeline stages: the exact split that makes the slowest stage fastest, with embedding and head counted.

Equal layers are dealt one by one to the stage that they slow down least, which is optimal for equal pieces. Otherwise a
stage is a run of layers, so taking more of them into one stage never makes the next one worse: for a given bound greedy
filling decides feasibility, and the smallest feasible bound is found by bisection.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate


def balance(
    costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0, most: Sequence[int] = ()
) -> tuple[int, ...] | None:
    """Layers of each stage such that the largest sum of `costs` per stage is smallest; `first` and `last` are the costs
    of embedding and head, `most[s]` bounds the layers of stage s (memory). Every stage gets a layer.

    None when the layers do not fit under `most`. Of equally good places a layer takes the latest: early stages hold
    more micro-batches at once.
    """
    if stages < 1 or len(costs) < stages:
        return None
    bounds = tuple(most) or (len(costs),) * stages
    if min(costs) == max(costs):
        return _deal(len(costs), costs[0], stages, first, last, bounds)
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


def _deal(
    layers: int, cost: float, stages: int, first: float, last: float, most: Sequence[int]
) -> tuple[int, ...] | None:
    """One layer for every stage, then each further one where the stage's time after it is smallest."""
    if sum(most) < layers or min(most) < 1:
        return None
    extra = [0.0] * stages
    extra[0] += first
    extra[-1] += last
    found = [1] * stages
    heap = [(extra[s] + 2 * cost, -s) for s in range(stages) if most[s] > 1]
    heapify(heap)
    for _ in range(layers - stages):
        _, stage = heappop(heap)
        found[-stage] += 1
        if found[-stage] < most[-stage]:
            heappush(heap, (extra[-stage] + (found[-stage] + 1) * cost, stage))
    return tuple(found)


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
