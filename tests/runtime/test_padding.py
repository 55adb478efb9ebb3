"""Sequences that their ranks do not divide: filled up with masked places, they train as one process does without."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from titan.compiler.lower import lower
from titan.compiler.plan.program import Plan
from titan.compiler.spec.schema import Spec
from titan.compiler.verify.proofs import verify
from titan.runtime.data import IGNORED, Padded

from tests.equivalence.comparison import Training, source_of, train_plan, train_reference, unproven
from tests.equivalence.configurations import single_strategy
from tests.equivalence.processes import train_processes
from tests.runtime.test_ring import documents_alone, equal, exact, gap, packed, spec, strategy
from tests.runtime.test_window import windowed

torch.set_num_threads(1)

LENGTH = 29


def short(family: str, precision: str = "fp64") -> Spec:
    """A model without a position more than the sequence has: what fills it up finds no learned row."""
    found = spec(family, LENGTH, precision)
    return replace(found, model=found.model.model_copy(update={"max_positions": LENGTH}))


@cache
def oracle(family: str) -> Training:
    """Plain autograd on the sequences as they are."""
    found = short(family)
    single = lower(found, single_strategy(found))
    return train_reference(single, found, train_plan(single, found, steps=1).initial)


CASES: tuple[tuple[dict[str, Any], int], ...] = (
    ({"context": 4}, 3),
    ({"context": 3}, 1),
    ({"context": 5, "context_order": "contiguous"}, 1),
    ({"context": 8}, 3),  # a rank and a half hold nothing else
    ({"context": 4, "context_heads": 2}, 3),
    ({"context": 4, "context_form": "gathered"}, 3),
    ({"context": 4, "context_form": "heads"}, 3),
    ({"tensor": 4, "sequence_parallel": True, "context_form": "gathered", "zero": 0}, 3),
    ({"context": 4, "tensor": 2, "sequence_parallel": True, "recompute": "full", "pipeline": 2}, 3),
    ({"context": 2, "data": 2, "zero": 3, "pipeline": 2, "schedule": "zero_bubble_h1"}, 3),
)


@pytest.mark.parametrize(("choices", "padding"), CASES, ids=lambda c: str(c).replace(" ", ""))
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_training_is_that_of_the_sequence_itself(choices: dict[str, Any], padding: int, family: str) -> None:
    found = short(family)
    plan = lower(found, strategy(found, **choices))
    assert plan.setting("train.padding") == padding and plan.setting("train.sequence") == LENGTH
    assert unproven(plan) == []
    assert exact(train_plan(plan, found), oracle(family))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("choices", [{"context": 4}, {"context": 3, "context_form": "gathered"}])
def test_packed_documents_are_filled_up(choices: dict[str, Any], family: str) -> None:
    found = packed(family)
    found = replace(found, train=found.train.model_copy(update={"sequence": LENGTH}))
    found = replace(found, model=found.model.model_copy(update={"max_positions": LENGTH}))
    plan = lower(found, strategy(found, **choices))
    assert plan.setting("train.padding") > 0 and unproven(plan) == []
    equal(train_plan(plan, found, steps=1), *documents_alone(found, LENGTH))


@pytest.mark.parametrize("choices", [
    {"context": 4}, {"context": 3, "context_order": "contiguous"}, {"context": 4, "context_heads": 2},
    {"context": 4, "data": 2, "zero": 3, "recompute": "full"},
    {"context": 2, "tensor": 2, "sequence_parallel": True, "pipeline": 2, "schedule": "zero_bubble_h1"},
])  # fmt: skip
def test_documents_windows_padding_and_missing_labels_at_once(choices: dict[str, Any]) -> None:
    """One layer that sees few tokens and one that sees all; a fifth of the labels is ignored, at random."""
    found = windowed("llama", (5, None), packed("llama"))
    found = replace(found, train=found.train.model_copy(update={"sequence": LENGTH}))
    plan = lower(found, strategy(found, **choices))
    assert plan.setting("train.padding") > 0 and unproven(plan) == []
    equal(train_plan(plan, found, steps=1), *documents_alone(found, LENGTH))


def test_processes_fill_up_too(tmp_path: Path) -> None:
    found = short("llama", "fp32")
    plan = lower(found, strategy(found, context=4))
    assert gap(train_processes(plan, source_of(found), 2, tmp_path), train_plan(plan, found)) < 1e-5


def test_what_fills_up_has_no_label_and_is_never_read() -> None:
    class Reads:
        def load(self, indices: Any, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
            assert 0 <= start < stop <= 6
            places = torch.arange(start, stop).expand(len(indices), -1)
            return places, places + 1

    source: Any = Reads()
    for start, stop in ((0, 8), (4, 8), (6, 8), (0, 6)):
        tokens, labels = Padded(source, 6).load([3, 5], start, stop)
        wanted = [p if p < 6 else 0 for p in range(start, stop)]
        assert tokens.tolist() == [wanted] * 2
        assert labels.tolist() == [[p + 1 if p < 6 else IGNORED for p in range(start, stop)]] * 2


@pytest.mark.parametrize("padding", [0, 2, 19, -1])
def test_another_padding_than_the_plan_s_loads_is_refused(padding: int) -> None:
    found = short("llama")
    plan = lower(found, strategy(found, context=4))
    settings = tuple((k, str(padding) if k == "train.padding" else v) for k, v in plan.settings)
    broken: Plan = replace(plan, settings=settings)
    assert not verify(broken)["data"].ok
