"""Plans of every schedule, executed small: as many chunks, a legal number of micro-batches, the found order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from titan.compiler.lower import lower
from titan.compiler.schedules.registry import SCHEDULES
from titan.compiler.search.search import search
from titan.compiler.shrink import WORLD, shrink
from titan.compiler.strategy import Strategy
from titan.runtime.execute import execute_and_compare

from tests.compiler.schedules.small import small_spec


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_large_plan_is_executed_small(name: str) -> None:
    chunks = 48 * (2 if name == "solved" else SCHEDULES[name].chunks)
    spec = small_spec(layers=2 * chunks, batch=192, devices=48)
    small, strategy = shrink(spec, Strategy(pipeline=48, micro_batches=192, schedule=name, stages=(2,) * chunks))
    row = SCHEDULES[name]
    assert strategy.pipeline <= WORLD and row.legal(strategy.pipeline, strategy.micro_batches)
    assert len(strategy.stages) == strategy.pipeline * chunks // 48
    assert sum(strategy.stages) == small.model.layer_count
    lower(small, strategy)


def test_a_found_order_is_executed_as_it_is() -> None:
    spec = small_spec(layers=8, batch=6, devices=2, parallel="pipeline = 2, micro_batch = 1, schedule = solved")
    found = search(spec)
    small, strategy = shrink(spec, found.strategy)
    assert strategy.written_order == found.strategy.written_order is not None
    assert all(comparison.ok for comparison in execute_and_compare(lower(small, strategy)))
    fewer = replace(found.strategy, pipeline=1, stages=(8,), written_order=None)
    assert shrink(spec, fewer)[1].written_order is None
