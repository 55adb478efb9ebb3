"""Local search on an order: elements change places on their rank as long as the step gets shorter within the limits."""

from __future__ import annotations

from random import Random

from titan.compiler.schedules.listing import Costs, usage
from titan.compiler.schedules.order import Element, Order, Pair
from titan.compiler.schedules.timetable import StalledOrder, Timetable, timetable

Item = Element | Pair
REACH = 12  # places that an element may jump


def improve(order: Order, costs: Costs, effort: int, random: Random, bound: float = 0.0) -> Order:
    """The best order found; `effort` bounds the elements that are timed. Never worse than what it starts from; ends
    early where the step time reaches `bound`."""
    programs = [list(items) for items in order.ranks]
    size = sum(map(len, programs))
    best = timetable(order, costs.durations)
    quality = _quality(best)
    for _ in range(effort // max(size, 1)):
        move = _move(programs, best, random)
        if move is None or quality[0] <= bound * (1 + 1e-9):
            break
        rank, source, target = move
        items = programs[rank]
        items.insert(target, items.pop(source))
        tried = Order(order.placement, tuple(map(tuple, programs)), order.copies)
        found = _timed(tried, costs, rank)
        if found is not None and _quality(found) <= quality:
            order, best, quality = tried, found, _quality(found)
        else:
            items.insert(source, items.pop(target))
    return order


def _timed(order: Order, costs: Costs, rank: int) -> Timetable | None:
    """The timetable; None when the rank exceeds its limit or the order stalls."""
    if costs.limits and usage(order, costs.frames)[rank] > costs.limits[rank]:
        return None
    try:
        return timetable(order, costs.durations)
    except StalledOrder:
        return None


def _quality(times: Timetable) -> tuple[float, float]:
    """Step time, then the sum of all ends: what comes earlier leaves room."""
    return times.makespan, sum(ends[-1] for ends in times.ends if ends)


def _move(programs: list[list[Item]], times: Timetable, random: Random) -> tuple[int, int, int] | None:
    """(rank, from, to) of an element behind an idle gap pulled before it, or of a random one."""
    rank = random.randrange(len(programs))
    items = programs[rank]
    if len(items) < 2:
        return (rank, 0, 0) if len(programs) > 1 else None
    gaps = [n for n in range(1, len(items)) if times.starts[rank][n] > times.ends[rank][n - 1] + 1e-12]
    if gaps and random.random() < 0.7:
        target = random.choice(gaps)
        return rank, min(target + random.randint(1, REACH), len(items) - 1), target
    source = random.randrange(len(items))
    return rank, source, max(0, min(len(items) - 1, source + random.choice((-1, 1)) * random.randint(1, REACH)))
