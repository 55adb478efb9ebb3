"""Rings under every schedule and beside every way to save memory, exact to 1e-12; and how often attention runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from titan.compiler.lower import lower
from titan.compiler.schedules.registry import SCHEDULES
from titan.compiler.spec.schema import Spec
from titan.runtime import attention_squares

from tests.equivalence.comparison import Training, train_plan, train_reference, unproven
from tests.equivalence.configurations import single_strategy
from tests.runtime.test_ring import gap, spec, strategy

torch.set_num_threads(1)

LAYERS = 4


@cache
def deep() -> Spec:
    """A layer for every chunk of two ranks, and micro-batches for every schedule."""
    found = spec("llama", batch=8)
    (group,) = found.model.layers
    layers = (group.model_copy(update={"count": LAYERS}),)
    return replace(found, model=found.model.model_copy(update={"layers": layers}))


@cache
def alone() -> Training:
    found = deep()
    single = lower(found, single_strategy(found))
    return train_reference(single, found, train_plan(single, found, steps=1).initial, steps=1)


def trained_exactly(**choices: Any) -> None:
    found = deep()
    pieces = SCHEDULES[choices.get("schedule", "one_f_one_b")].make(choices.get("pipeline", 1), 4).chunks_per_copy
    s = strategy(found, **{"micro_batch": 2, "stages": (LAYERS // pieces,) * pieces, **choices})
    plan = lower(found, s)
    assert unproven(plan) == []
    assert gap(train_plan(plan, found, steps=1), alone()) < 1e-12


RINGS: tuple[dict[str, Any], ...] = ({"context": 2}, {"context": 4, "context_heads": 2}, {"context": 3})  # in turn


@pytest.mark.parametrize(("schedule", "choices"), [(name, RINGS[n % 3]) for n, name in enumerate(SCHEDULES)], ids=str)
def test_every_schedule(schedule: str, choices: dict[str, Any]) -> None:
    """A ring of three divides no sequence here: it is filled up."""
    trained_exactly(pipeline=2, schedule=schedule, **choices)


@pytest.mark.parametrize(
    "choices",
    [
        {"context": 4, "data": 2, "zero": 2, "recompute": "full", "pipeline": 2, "schedule": "zero_bubble_v"},
        {"context": 2, "data": 2, "zero": 3, "recompute": "adaptive", "tensor": 2, "sequence_parallel": True},
        {"context": 8, "context_heads": 2, "zero": 3, "recompute": "full"},
        {"context": 5, "zero": 3, "recompute": "selective", "context_order": "contiguous"},
        {"context": 3, "data": 2, "tensor": 2, "zero": 2, "recompute": "full"},
    ],
    ids=lambda choices: "-".join(f"{k}_{v}" for k, v in choices.items()),
)
def test_beside_all_that_saves_memory(choices: dict[str, Any]) -> None:
    trained_exactly(**choices)


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How often a kernel of attention runs, forward and backward."""
    calls = {"attention_block": 0, "attention_block_backward": 0}

    def counting(name: str, kernel: Any) -> Any:
        def call(*operands: Any) -> Any:
            calls[name] += 1
            return kernel(*operands)

        return call

    with ExitStack() as stack:
        for name in calls:
            kernel = getattr(attention_squares, name)
            stack.enter_context(mock.patch.object(attention_squares, name, counting(name, kernel)))
        yield calls


@pytest.mark.parametrize("recompute", ["none", "full", "adaptive"])
@pytest.mark.parametrize(
    ("choices", "steps"),
    [
        ({"context": 4}, 4),
        ({"context": 4, "context_heads": 2, "pipeline": 2}, 2),
        ({"context": 2, "context_form": "heads"}, 1),
    ],
    ids=["ring", "mixed", "heads"],
)
def test_attention_runs_once_forward_and_once_backward(choices: dict[str, Any], steps: int, recompute: str) -> None:
    """One kernel for each micro-batch, layer, rank of the sequence and step of its ring, whatever is recomputed."""
    found = spec("llama")
    plan = lower(found, strategy(found, recompute=recompute, **choices))
    with counted() as calls:
        train_plan(plan, found, steps=1)
    assert set(calls.values()) == {2 * 2 * choices["context"] * steps}
