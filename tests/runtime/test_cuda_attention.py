"""Every way to attention, on the CPU and on a CUDA device, against masked softmax in float64 through autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from titan.compiler.plan.sequence import held, needed_steps
from titan.runtime.attention_blocks import attention_block, attention_block_backward, merge
from titan.runtime.operators import attention, attention_documents
from titan.runtime.place import Place
from titan.runtime.positions import positions
from titan.runtime.ring_steps import (
    documents_backward,
    first_documents,
    first_step,
    next_documents,
    next_step,
    step_backward,
)
from torch import Tensor

torch.set_num_threads(1)

absent = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
HEADS = [pytest.param("cuda", width, marks=absent) for width in (12, 64, 256, 320)]
# most that results and gradients may differ, as a share of their norm
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
WIDTHS = [pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in TOLERANCE]
Operands = tuple[Tensor, Tensor, Tensor]
Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # out, lse, and the gradients of q, k and v

every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=absent)])
every_width = pytest.mark.parametrize("dtype", WIDTHS)


def drawn(dtype: torch.dtype, device: str, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).to(device) for s in shapes)


def wanted(operands: Operands, gradient: Tensor, mask: Tensor) -> Results:
    """Of [batch, heads, length, d] operands, on the CPU; `mask` [..., queries, keys]: who sees whom."""
    q, k, v = (x.detach().cpu().double().requires_grad_() for x in operands)
    wide = [x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v)]
    scores = (q @ wide[0].transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    out = scores.softmax(-1) @ wide[1]
    out.backward(gradient.cpu().double())
    gradients = [x.grad for x in (q, k, v)]
    assert gradients[0] is not None and gradients[1] is not None and gradients[2] is not None
    return out.detach(), scores.detach().logsumexp(-1), gradients[0], gradients[1], gradients[2]


def near(found: tuple[Tensor, ...], right: Results, tolerance: float) -> None:
    """A query that sees one key has no gradient but rounding: a gradient counts at least half as much as that of v."""
    least = (0.0, 0.0, *3 * (float(right[4].norm()) / 2,))
    for name, a, b, floor in zip(("out", "lse", "dq", "dk", "dv"), found, right, least, strict=True):
        assert a.shape == b.shape, name
        assert float((a.cpu().double() - b).norm()) <= tolerance * max(floor, float(b.norm())), name


def split(x: Tensor, width: int) -> Tensor:
    return x.unflatten(-1, (-1, width)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


@pytest.mark.parametrize(("device", "width"), [("cpu", 20), *HEADS])
@every_width
@pytest.mark.parametrize(
    ("queries", "keys", "causal"), [(1, 1, True), (70, 70, True), (128, 128, True), (33, 100, False)]
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1)])
def test_blocks(
    queries: int, keys: int, causal: bool, heads: int, kv_heads: int, width: int, dtype: torch.dtype, device: str
) -> None:
    """Operands as the plan holds them, views of [batch, length, heads * width]."""
    shapes = ((2, queries, heads * width), (2, keys, kv_heads * width), (2, keys, kv_heads * width))
    q, k, v, gradient = (split(x, width) for x in drawn(dtype, device, *shapes, shapes[0]))
    mask = torch.ones(queries, keys, dtype=torch.bool).tril() if causal else torch.ones(1, dtype=torch.bool)
    right = wanted((q, k, v), gradient, mask)
    out, lse = attention_block(q, k, v, causal)
    assert out.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    found = attention_block_backward(gradient, q, k, v, out, lse.contiguous(), causal)
    assert all(x.dtype == dtype for x in found)
    near((out, lse, *found), right, TOLERANCE[dtype])


@every_device
@every_width
def test_merged_blocks_are_the_whole(dtype: torch.dtype, device: str) -> None:
    """Backward of each block from the output and log-sum-exp of all."""
    q, k, v, gradient = drawn(dtype, device, (2, 4, 50, 64), (2, 2, 90, 64), (2, 2, 90, 64), (2, 4, 50, 64))
    right = wanted((q, k, v), gradient, torch.ones(1, dtype=torch.bool))
    pieces = [(k[:, :, a:b], v[:, :, a:b]) for a, b in ((0, 33), (33, 90))]
    first, second = (attention_block(q, *piece, False) for piece in pieces)
    out, lse = merge(first, second)
    parts = [attention_block_backward(gradient, q, *piece, out, lse, False) for piece in pieces]
    dq = parts[0][0].double() + parts[1][0].double()
    dk, dv = (torch.cat([p[n] for p in parts], 2) for n in (1, 2))
    near((out, lse, dq, dk, dv), right, TOLERANCE[dtype])


def starts_of(length: int) -> Tensor:
    """First position of the document of each token; two samples."""
    ends = ((4, 5, 40, 71), (20, 64))
    rows = [[max([e for e in found if e <= p], default=0) for p in range(length)] for found in ends]
    return torch.tensor(rows)


def band(queries: Tensor, keys: Tensor, window: int, starts: Tensor | None) -> Tensor:
    """[samples or 1, 1, queries, keys]: a query sees the last `window` keys up to its own, in its document."""
    rows, columns = queries.unsqueeze(1), keys.unsqueeze(0)
    mask = (columns <= rows) & (columns > rows - (window or len(keys)))
    found = mask.unsqueeze(0)
    return (found if starts is None else found & (columns >= starts[:, queries].unsqueeze(2))).unsqueeze(1)


@every_device
@every_width
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [0, 1, 33])
@pytest.mark.parametrize(("length", "start"), [(100, 0), (36, 48)])
def test_whole_attention(length: int, start: int, window: int, packed: bool, dtype: torch.dtype, device: str) -> None:
    """Of queries that begin at the keys' first position, or later as with gathered keys."""
    width, keys = 16, 100
    shapes = ((2, length, 4 * width), (2, keys, 2 * width), (2, keys, 2 * width))
    q, k, v, gradient = drawn(dtype, device, *shapes, shapes[0])
    where = torch.arange(start, start + length)
    starts = starts_of(keys) if packed else None
    mask = band(where, torch.arange(keys), window, starts)
    right = wanted((split(q, width), split(k, width), split(v, width)), split(gradient, width), mask)
    attributes: dict[str, Any] = {"head_dim": width, "causal": True, "start": start}
    attributes |= {"window": window} if window else {}
    place = Place(seed=0, step=0, samples=(0, 1))
    saved = {"q": q, "k": k, "v": v}
    if starts is not None:
        saved["starts"] = starts[:, where].to(device)
        out, lse = attention_documents.forward(attributes, place, q, k, v, saved["starts"])
    else:
        out, lse = attention.forward(attributes, place, q, k, v)
    backward: Callable[..., tuple[Tensor, ...]] = (attention_documents if packed else attention).backward_input
    found = backward(attributes, place, {**saved, "out": out, "lse": lse}, (gradient,))
    near((split(out, width), lse, *(split(x, width) for x in found)), right, TOLERANCE[dtype])


@every_device
@every_width
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [0, 7, 33])
@pytest.mark.parametrize("zigzag", [True, False])
def test_all_steps_of_a_ring(zigzag: bool, window: int, packed: bool, dtype: torch.dtype, device: str) -> None:
    """Four ranks, one after another; keys and values with a quarter of the heads."""
    ring, length, width = 4, 24, 16
    shapes = ((2, ring * length, 4 * width), (2, ring * length, width), (2, ring * length, width))
    q, k, v, gradient = drawn(dtype, device, *shapes, shapes[0])
    starts = starts_of(ring * length) if packed else None
    places = torch.arange(ring * length)
    right = wanted(
        (split(q, width), split(k, width), split(v, width)),
        split(gradient, width),
        band(places, places, window, starts),
    )
    own = [positions(held(rank, ring, zigzag, length)) for rank in range(ring)]
    pairs = [torch.stack((k[:, at], v[:, at])) for at in own]
    given: dict[str, Any] = {"head_dim": width, "causal": True, "ring": ring, "zigzag": zigzag}
    given |= {"window": window} if window else {}
    steps = needed_steps(ring, zigzag, length, window)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    out, dq = torch.zeros_like(q), torch.zeros_like(q, dtype=wide)
    lse = torch.zeros(2, 4, ring * length, dtype=wide, device=device)
    dkv = [torch.zeros_like(pair, dtype=wide) for pair in pairs]
    for rank, at in enumerate(own):
        document = () if starts is None else (starts[:, at].to(device),)
        step_of = [{**given, "rank": rank, "step": step, "final": step == steps[-1]} for step in steps]
        queries = q[:, at]
        found = _first(step_of[0], queries, pairs[rank], *document)
        for attributes in step_of[1:]:
            found = _next(attributes, queries, pairs[(rank - attributes["step"]) % ring], *document, partial=found)
        assert found[0].dtype == dtype and found[1].dtype == wide
        out[:, at], lse[:, :, at] = found
        for attributes in step_of:
            other = (rank - attributes["step"]) % ring
            saved = {"q": queries, "kv": pairs[other], "out": found[0], "lse": found[1]}
            saved |= {"starts": document[0]} if document else {}
            part = (documents_backward if document else step_backward)(attributes, saved, (gradient[:, at],))
            assert part[0].dtype == part[1].dtype == wide
            dq[:, at] += part[0]
            dkv[other] += part[1]
    dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for at, pair in zip(own, dkv, strict=True):
        dk[:, at], dv[:, at] = pair
    near((split(out, width), lse, *(split(x, width) for x in (dq, dk, dv))), right, TOLERANCE[dtype])


def _first(attributes: dict[str, Any], q: Tensor, kv: Tensor, *starts: Tensor) -> tuple[Tensor, Tensor]:
    return first_documents(attributes, q, kv, *starts) if starts else first_step(attributes, q, kv)


def _next(
    attributes: dict[str, Any], q: Tensor, kv: Tensor, *starts: Tensor, partial: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    return next_documents(attributes, (q, kv, *starts), *partial) if starts else next_step(attributes, q, kv, *partial)
