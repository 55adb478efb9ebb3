"""Timetables against start times that are raised until every order and every need holds."""

from __future__ import annotations

import random

import pytest
from titan.compiler.schedules.order import Element, Order, Pair
from titan.compiler.schedules.registry import SCHEDULES
from titan.compiler.schedules.timetable import Durations, StalledOrder, timetable


def naive_ends(order: Order, durations: Durations) -> list[list[float]]:
    """Every rank goes on as soon as what its next item needs is known, item by item, in passes over all ranks."""
    ended: dict[Element, tuple[float, int]] = {}
    ends: list[list[float]] = [[] for _ in order.ranks]
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(order.ranks):
            if len(ends[rank]) == len(program):
                continue
            item = program[len(ends[rank])]
            own = [item.forward, item.backward] if isinstance(item, Pair) else [item]
            start = ends[rank][-1] if ends[rank] else 0.0
            try:
                for end, where in (ended[need] for element in own for need in naive_needs(element, order, ended)):
                    start = max(start, end + durations.transfer * (where != rank))
            except KeyError:
                continue
            ends[rank].append(start + durations.of(item))
            ended |= dict.fromkeys(own, (ends[rank][-1], rank))
            moved = True
    return ends


def naive_needs(element: Element, order: Order, ended: dict[Element, tuple[float, int]]) -> list[Element]:
    phase, chunk, i = element.phase, element.chunk, element.micro_batch
    if phase == "W":
        return [Element("I", chunk, i)]
    if phase == "F":
        return [] if order.first(chunk) else [Element("F", chunk - 1, i)]
    whole, split = Element("B", chunk + 1, i), Element("I", chunk + 1, i)
    after = [] if order.last(chunk) else [whole if whole in ended else split]
    return [Element("F", chunk, i), *after]


def random_durations(chunks: int, chance: random.Random) -> Durations:
    forward, inputs, weights = (tuple(chance.uniform(0, 3) for _ in range(chunks)) for _ in range(3))
    return Durations(forward, inputs, weights, chance.choice((0.0, chance.uniform(0, 1))), chance.uniform(0.8, 1.0))


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("ranks", [2, 4])
def test_equals_the_naive_one(name: str, ranks: int) -> None:
    chance = random.Random(f"{name}{ranks}")
    for micro_batches in (n for n in (2 * ranks, 3 * ranks, 4 * ranks + 2) if SCHEDULES[name].legal(ranks, n)):
        order = SCHEDULES[name].order(ranks, micro_batches)
        durations = random_durations(len(order.placement), chance)
        assert [list(ends) for ends in timetable(order, durations).ends] == naive_ends(order, durations)


@pytest.mark.parametrize("seed", range(20))
def test_orders_out_of_order_stall_where_the_naive_one_does(seed: int) -> None:
    """Elements have changed places at random, needs of their own rank too."""
    chance = random.Random(seed)
    order = SCHEDULES[chance.choice(("zero_bubble_v", "one_f_one_b", "dualpipe"))].order(4, 8)
    ranks = [list(items) for items in order.ranks]
    for _ in range(chance.randrange(1, 4)):
        items = chance.choice(ranks)
        items.insert(chance.randrange(len(items)), items.pop(chance.randrange(len(items))))
    changed = Order(order.placement, tuple(map(tuple, ranks)), order.copies)
    durations = random_durations(len(order.placement), chance)
    ends = naive_ends(changed, durations)
    stuck = tuple((r, str(changed.ranks[r][len(done)])) for r, done in enumerate(ends) if len(done) < len(ranks[r]))
    if stuck:
        with pytest.raises(StalledOrder) as stall:
            timetable(changed, durations)
        assert stall.value.waiting == stuck
    else:
        assert [list(done) for done in timetable(changed, durations).ends] == ends
