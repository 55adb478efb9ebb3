"""Sliding-window attention: the kernels against the full mask, and training against one process in every form."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from titan.compiler.lower import lower
from titan.compiler.plan.mask import squares
from titan.compiler.spec.schema import Spec
from titan.runtime.attention_squares import attention_of, everywhere, gradients_of

from tests.equivalence.comparison import Training, train_plan, train_reference, unproven
from tests.equivalence.configurations import single_strategy
from tests.runtime.test_ring import documents_alone, equal, exact, packed, spec, strategy

torch.set_num_threads(1)


@pytest.mark.parametrize("window", [1, 2, 5, 16, 23, 40])
@pytest.mark.parametrize(("length", "start"), [(40, 0), (16, 24)])
def test_squares_are_attention_under_the_full_mask(window: int, length: int, start: int) -> None:
    """Forward and backward in float64, queries of a whole sequence and of its end, grouped heads."""
    generator = torch.Generator().manual_seed(window)
    q, k, v = (
        torch.randn(2, n, h * 8, dtype=torch.float64, generator=generator) for n, h in ((length, 4), (40, 2), (40, 2))
    )
    operands = [x.clone().requires_grad_() for x in (q, k, v)]
    heads = [x.view(2, x.shape[1], -1, 8).transpose(1, 2) for x in operands]
    rows, columns = torch.arange(start, start + length).unsqueeze(1), torch.arange(40)
    mask = (columns <= rows) & (columns > rows - window)
    wanted = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)
    wanted = wanted.transpose(1, 2).flatten(2)
    gradient = torch.randn(wanted.shape, dtype=torch.float64, generator=generator)
    wanted.backward(gradient)
    attributes = {"head_dim": 8}
    found = tuple(squares((start, length), (0, 40), window))
    out, lse = attention_of(attributes, (q, k, v), everywhere(found))
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    saved = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    for ours, operand in zip(gradients_of(attributes, saved, gradient, everywhere(found)), operands, strict=True):
        torch.testing.assert_close(ours, operand.grad, rtol=1e-12, atol=1e-12)


def windowed(family: str, windows: tuple[int | None, ...], given: Spec | None = None) -> Spec:
    """A model whose layers see so many tokens each."""
    found = given or spec(family)
    group = found.model.layers[0]
    layers = tuple(
        group.model_copy(update={"count": 1, "block": group.block.model_copy(update={"window": w})}) for w in windows
    )
    return replace(found, model=found.model.model_copy(update={"layers": layers}))


@cache
def oracle(family: str, windows: tuple[int | None, ...]) -> Training:
    found = windowed(family, windows)
    single = lower(found, single_strategy(found))
    return train_reference(single, found, train_plan(single, found, steps=1).initial)


CASES: tuple[dict[str, Any], ...] = (
    {"context": 4, "context_order": "contiguous"},
    {"context": 8, "context_order": "contiguous", "recompute": "full"},
    {"context": 8},
    {"context": 4, "context_heads": 2, "context_order": "contiguous"},
    {"context": 4, "context_form": "gathered"},
    {"context": 4, "context_form": "heads"},
    {"context": 4, "context_order": "contiguous", "tensor": 2, "sequence_parallel": True, "pipeline": 2},
    {"context": 4, "context_order": "contiguous", "data": 2, "zero": 3, "pipeline": 2, "schedule": "zero_bubble_h1"},
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(f"{k}_{v}" for k, v in case.items()))
@pytest.mark.parametrize("windows", [(5, None), (11, 11)])
def test_local_and_global_layers_train_as_in_one_process(case: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    found = windowed("llama", windows)
    plan = lower(found, strategy(found, **case))
    assert unproven(plan) == []
    assert exact(train_plan(plan, found), oracle("llama", windows))


@pytest.mark.parametrize("choices", [
    {"context_form": "gathered"}, {"context": 4, "context_order": "contiguous"}, {"context": 4}, {"context": 2},
])  # fmt: skip
def test_windows_inside_documents(choices: dict[str, Any]) -> None:
    found = windowed("gpt2", (6, 6), packed("gpt2"))
    plan = lower(found, strategy(found, **choices))
    assert unproven(plan) == []
    equal(train_plan(plan, found, steps=1), *alone())


@cache
def alone() -> tuple[float, dict[str, torch.Tensor]]:
    return documents_alone(windowed("gpt2", (6, 6), packed("gpt2")))
