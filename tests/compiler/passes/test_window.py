"""How many sends may be outstanding: the fewest that cost no time, found once."""

from __future__ import annotations

import pytest
from titan.compiler.lower import lower
from titan.compiler.passes import window
from titan.compiler.passes.window import SIZES, sends_outstanding
from titan.compiler.schedules.timetable import Durations, timetable
from titan.compiler.strategy import Strategy

from tests.compiler.verify.tiny import model, spec

UNEVEN = Strategy(pipeline=4, stages=(3,) * 8, schedule="interleaved", micro_batches=10)
CASES = [
    Strategy(pipeline=4, stages=(6,) * 4, micro_batches=16),
    Strategy(pipeline=4, stages=(6,) * 4, schedule="gpipe", micro_batches=16),
    Strategy(pipeline=4, stages=(3,) * 8, schedule="zero_bubble_v", micro_batches=16),
    Strategy(pipeline=4, stages=(3,) * 8, schedule="interleaved", micro_batches=16),
    UNEVEN,
]


@pytest.mark.parametrize("strategy", CASES, ids=lambda s: f"{s.schedule}-{s.micro_batches}")
def test_no_fewer_sends_take_as_long_as_any_number(strategy: Strategy) -> None:
    order, found = strategy.order, sends_outstanding(strategy)
    unbounded = timetable(order, Durations.unit(len(order.placement))).makespan
    assert window._makespan(order, found) == unbounded
    fewer = [size for size in SIZES if size < found]
    assert all(window._makespan(order, size) != unbounded for size in fewer)


def test_an_order_is_run_once_for_each_number_however_many_ranks_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    run = window._makespan
    monkeypatch.setattr(window, "_makespan", lambda order, size: tried.append(size) or run(order, size))
    window._smallest.cache_clear()
    lower(spec(model("llama", 24, 4, 16, False), 4, 10), UNEVEN)
    assert tried and len(tried) == len({*tried})
