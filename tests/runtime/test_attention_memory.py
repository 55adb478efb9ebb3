"""What attention is predicted to form beside its results, against the storages that it makes, in every form."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from titan.compiler.plan.attention import attention_scratch
from titan.compiler.plan.operators import TensorType
from titan.compiler.plan.sequence import needed_steps
from titan.runtime.operators import attention, attention_block, attention_documents, attention_merge
from titan.runtime.place import Place
from torch import Tensor

from tests.runtime.alone import beside

torch.set_num_threads(1)

LENGTH, WIDTH, HEADS, KV_HEADS, RANKS = 32, 16, 4, 2, 4
NAMES = {torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16"}
PLACE = Place(seed=0, step=0, samples=(0, 1))

every_dtype = pytest.mark.parametrize("dtype", NAMES, ids=NAMES.get)
every_batch = pytest.mark.parametrize("batch", [1, 2])


def backward_of(operator: Any, attributes: dict[str, Any], names: str) -> Callable[..., tuple[Tensor, ...]]:
    """Its last operand is the gradient of the result."""

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        saved = dict(zip(names.split(), given[:-1], strict=True))
        return operator.backward_input(attributes, PLACE, saved, given[-1:])  # type: ignore[no-any-return]

    return run


def drawn(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def kind(x: Tensor) -> TensorType:
    return TensorType(NAMES[x.dtype], tuple(x.shape))


def predicted(attributes: dict[str, Any], q: Tensor, keys: Tensor, **how: bool) -> int:
    given = {"packed": False, "merged": False, "backward": False} | how
    return attention_scratch(tuple(attributes.items()), kind(q), kind(keys), **given)


@every_dtype
@every_batch
@pytest.mark.parametrize("window", [0, 5, 20])
@pytest.mark.parametrize("ranks", [1, RANKS])
def test_over_gathered_keys(ranks: int, window: int, batch: int, dtype: torch.dtype) -> None:
    """Of the rank that holds most; exact but for the log-sum-exp, whose layout the kernel chooses."""
    shapes = ((batch, LENGTH, HEADS * WIDTH), *2 * ((batch, ranks * LENGTH, KV_HEADS * WIDTH),))
    q, k, v, gradient = drawn(dtype, *shapes, shapes[0])
    attributes: dict[str, Any] = {"head_dim": WIDTH, "causal": True} | ({"window": window} if window else {})
    forward, backward = [], []
    for rank in range(ranks):
        here = {**attributes, "start": rank * LENGTH}
        forward.append(beside(partial(attention.forward, here, PLACE), q, k, v))
        out, lse = attention.forward(here, PLACE, q, k, v)
        backward.append(beside(backward_of(attention, here, "q k v out lse"), q, k, v, out, lse, gradient))
    everywhere = attributes | ({"start": f"@context*{LENGTH}"} if ranks > 1 else {})
    near(predicted(everywhere, q, k), max(forward), out)
    near(predicted(everywhere, q, k, backward=True), max(backward), out)


def near(expected: int, found: int, out: Tensor) -> None:
    statistics = 8 if out.dtype == torch.float64 else 4
    assert abs(expected - found) <= 2 * statistics * out.numel() // WIDTH, (expected, found)


@every_dtype
@every_batch
@pytest.mark.parametrize("window", [0, 5, 40])
@pytest.mark.parametrize("zigzag", [True, False])
def test_around_a_ring(zigzag: bool, window: int, batch: int, dtype: torch.dtype) -> None:
    """Every step, of the rank that holds most in it."""
    q, kv, gradient = drawn(
        dtype, (batch, LENGTH, HEADS * WIDTH), (2, batch, LENGTH, KV_HEADS * WIDTH), (batch, LENGTH, HEADS * WIDTH)
    )
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    so_far = (torch.zeros_like(q, dtype=wide), torch.zeros(batch, HEADS, LENGTH, dtype=wide))
    given: dict[str, Any] = {"head_dim": WIDTH, "causal": True, "ring": RANKS, "zigzag": zigzag}
    given |= {"window": window} if window else {}
    steps = needed_steps(RANKS, zigzag, LENGTH, window)
    for step in steps:
        forward, backward = [], []
        here = {**given, "step": step, "final": step == steps[-1]}
        for rank in range(RANKS):
            of_rank = {**here, "rank": rank}
            operator, operands = (attention_merge, (q, kv, *so_far)) if step else (attention_block, (q, kv))
            forward.append(beside(partial(operator.forward, of_rank, PLACE), *operands))
            run = backward_of(attention_block, of_rank, "q kv out lse")
            backward.append(beside(run, q, kv, q, so_far[1], gradient))
        everywhere = {**here, "rank": "@context"}
        near(predicted(everywhere, q, kv, merged=step > 0), max(forward), q)
        near(predicted(everywhere, q, kv, backward=True), max(backward), q)


@every_dtype
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("ends", [(), (7, 20), tuple(range(1, LENGTH))])
def test_documents_hold_no_more_than_one(ends: tuple[int, ...], window: int, dtype: torch.dtype) -> None:
    """What is counted is a document of the whole sequence in every sample."""
    shapes = ((2, LENGTH, HEADS * WIDTH), *2 * ((2, LENGTH, KV_HEADS * WIDTH),))
    q, k, v, gradient = drawn(dtype, *shapes, shapes[0])
    starts = torch.tensor([[max((e for e in ends if e <= p), default=0) for p in range(LENGTH)]] * 2)
    attributes: dict[str, Any] = {"head_dim": WIDTH, "causal": True} | ({"window": window} if window else {})
    forward = beside(partial(attention_documents.forward, attributes, PLACE), q, k, v, starts)
    out, lse = attention_documents.forward(attributes, PLACE, q, k, v, starts)
    run = backward_of(attention_documents, attributes, "q k v starts out lse")
    backward = beside(run, q, k, v, starts, out, lse, gradient)
    slack = 4 * starts.nbytes  # the documents' bounds
    assert forward <= predicted(attributes, q, k, packed=True) + slack
    assert backward <= predicted(attributes, q, k, packed=True, backward=True) + slack
    if not ends:
        near(predicted(attributes, q, k, packed=True, backward=True), backward, q)
