"""Plans and their ledgers have no cycles: Python's search for them is kept away from both (`compiler/garbage.py`)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from titan.compiler.cost.memory import memory_ledger
from titan.compiler.lower import lower
from titan.compiler.plan.instruction import Instruction
from titan.compiler.spec.resolve import load_spec
from titan.compiler.strategy import Strategy

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama3_8b_2gpu.titan"


@pytest.fixture
def cyclic_garbage() -> Iterator[list[object]]:
    """Everything that only a search for cycles frees, once that was done."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield gc.garbage
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()
    gc.collect()


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(data=2, zero=3, micro_batches=4, stages=(32,)),
        Strategy(pipeline=2, schedule="zero_bubble_h1", micro_batches=4, stages=(16, 16)),
    ],
    ids=["zero 3", "pipeline"],
)
def test_a_plan_goes_with_its_last_name(strategy: Strategy, cyclic_garbage: list[object]) -> None:
    plan = lower(load_spec(EXAMPLE), strategy)
    memory_ledger(plan)
    del plan
    gc.collect()
    assert not [i for i in cyclic_garbage if isinstance(i, Instruction)]
