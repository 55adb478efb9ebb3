"""Order tables of every schedule, as text under review; each order shown is complete and can be run to its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from titan.compiler.schedules.order import Order
from titan.compiler.schedules.registry import SCHEDULES
from titan.compiler.schedules.timetable import Durations, timetable

from tests.conftest import GOLDEN

RANKS = 4


def shown(name: str) -> tuple[Order, str]:
    """Four ranks, the fewest micro-batches from eight on; a line per rank."""
    micro_batches = next(m for m in range(2 * RANKS, 4 * RANKS) if SCHEDULES[name].legal(RANKS, m))
    order = SCHEDULES[name].make(RANKS, micro_batches)
    head = f"{name}: {RANKS} ranks, {micro_batches} micro-batches, chunk c on rank {list(order.placement)}"
    lines = [f"rank {rank}  {' '.join(map(str, items))}" for rank, items in enumerate(order.ranks)]
    return order, "\n".join((head, *lines))


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_order_table(name: str, golden: Callable[[str], Callable[[str], None]]) -> None:
    order, text = shown(name)
    golden(f"schedules/{name}.expect")(text)
    table = timetable(order, Durations.unit(len(order.placement)))  # raises where an element can never start
    assert 0 <= table.flush_bubble < 1


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_piece_runs_once_on_the_rank_that_holds_it(name: str) -> None:
    """Forward once and backward once (whole, or inputs and weights) for each micro-batch and chunk of one copy."""
    for ranks in (1, 2, 3, 4, 6):
        for micro_batches in range(1, 14):
            if not SCHEDULES[name].legal(ranks, micro_batches):
                continue
            order = SCHEDULES[name].make(ranks, micro_batches)
            done: Counter[tuple[str, int, int]] = Counter()
            for rank in range(ranks):
                for element in order.elements(rank):
                    assert order.placement[element.chunk] == rank
                    stage = element.chunk % order.chunks_per_copy
                    for phase in "IW" if element.phase == "B" else element.phase:
                        done[phase, stage, element.micro_batch] += 1
            pieces = {(p, c, i) for p in "FIW" for c in range(order.chunks_per_copy) for i in range(micro_batches)}
            assert done == Counter(pieces)


def test_every_schedule_has_its_file() -> None:
    assert {file.stem for file in (GOLDEN / "schedules").iterdir()} == set(SCHEDULES)
