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


def balance_ranks(
    costs: Sequence[float],
    placement: tuple[int, ...],
    first: float = 0.0,
    last: float = 0.0,
    most: Sequence[int] = (),
) -> tuple[int, ...] | None:
    """Layers of each chunk in model order where chunks that lie together share their time: `placement[c]` names the
    place of chunk c (a rank, or a pair of ranks that hold the same two stages). `most[p]` bounds the layers of a place.

    Exact for equal layers; for others the equal deal is improved by moving chunk borders as long as the slowest place,
    or the spread of all, gets smaller. None when the layers do not fit.
    """
    if len(set(placement)) == len(placement):
        return balance(costs, len(placement), first, last, most)
    if len(costs) < len(placement):
        return None
    places = sorted(set(placement))
    extra = dict.fromkeys(places, 0.0)
    extra[placement[0]] += first
    extra[placement[-1]] += last
    mean = sum(costs) / len(costs)
    bounds = dict(zip(places, most or (len(costs),) * len(places), strict=True))
    totals = _totals(len(costs), mean, placement, extra, bounds)
    if totals is None:
        return None
    ends = {0: first, len(placement) - 1: last}
    counts = _share(totals, mean, placement, ends)
    return counts if min(costs) == max(costs) else _improve(costs, counts, placement, extra, bounds)


def _totals(
    layers: int, cost: float, placement: tuple[int, ...], extra: dict[int, float], most: dict[int, int]
) -> dict[int, int] | None:
    """Layers of each place: one per chunk, then each further one where the place's time after it is smallest."""
    found = {place: placement.count(place) for place in extra}
    left = layers - sum(found.values())
    if sum(most.values()) < layers or any(most[p] < n for p, n in found.items()):
        return None
    heap = [(extra[p] + (n + 1) * cost, -p) for p, n in found.items() if most[p] > n]
    heapify(heap)
    for _ in range(left):
        _, place = heappop(heap)
        found[-place] += 1
        if found[-place] < most[-place]:
            heappush(heap, (extra[-place] + (found[-place] + 1) * cost, place))
    return found


def _share(totals: dict[int, int], cost: float, placement: Sequence[int], ends: dict[int, float]) -> tuple[int, ...]:
    """Layers of each chunk: those of a place so dealt that its chunks take equally long."""
    counts = [1] * len(placement)
    for place, total in totals.items():
        chunks = [c for c, p in enumerate(placement) if p == place]
        for _ in range(total - len(chunks)):
            counts[min(chunks, key=lambda c: (ends.get(c, 0.0) + (counts[c] + 1) * cost, -c))] += 1
    return tuple(counts)


def _improve(
    costs: Sequence[float],
    counts: tuple[int, ...],
    placement: Sequence[int],
    extra: dict[int, float],
    most: dict[int, int],
) -> tuple[int, ...]:
    sums = [0.0, *accumulate(costs)]

    def quality(tried: Sequence[int]) -> tuple[float, float]:
        loads, layers, start = dict(extra), dict.fromkeys(extra, 0), 0
        for place, count in zip(placement, tried, strict=True):
            loads[place] += sums[start + count] - sums[start]
            layers[place] += count
            start += count
        if any(layers[p] > most[p] for p in layers):
            return float("inf"), float("inf")
        return max(loads.values()), sum(v * v for v in loads.values())

    best = quality(counts)
    moved = True
    while moved:
        moved = False
        for border in range(len(counts) - 1):
            for giver, taker in ((border, border + 1), (border + 1, border)):
                tried = list(counts)
                tried[giver] -= 1
                tried[taker] += 1
                if tried[giver] >= 1 and quality(tried) < best:
                    counts, best, moved = tuple(tried), quality(tried), True
    return counts
