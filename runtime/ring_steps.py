"""One step of ring attention: the queries of this rank against the keys that are visiting it.

Tensors are [batch, length, heads * head_dim] as in the plan; which queries see which keys follows from the step and the
rank (`titan.compiler.plan.sequence`). Partial results and gradients are float32, or float64 in a float64 run.
"""

from __future__ import annotations

import torch
from titan.compiler.plan.sequence import Run, Square, runs, visible
from titan.runtime.attention_blocks import attention_block, attention_block_backward
from titan.runtime.documents import attend, attend_backward
from titan.runtime.dtypes import statistics
from titan.runtime.place import Attributes, Gradients, Saved
from torch import Tensor

Partial = tuple[Tensor, Tensor]  # out [batch, length, heads * head_dim], lse [batch, heads, length]


def first_step(attributes: Attributes, q: Tensor, kv: Tensor) -> Partial:
    """Own queries against own keys."""
    square = visible(attributes, q.shape[1])
    assert square is not None  # the own keys are always seen
    out, lse = _forward(attributes, square, q, kv)
    joined = out.transpose(1, 2).flatten(2)
    return joined.to(_result_dtype(attributes, q)).contiguous(), lse


def next_step(attributes: Attributes, q: Tensor, kv: Tensor, partial: Tensor, partial_lse: Tensor) -> Partial:
    """The partial result of the keys so far, with the visiting keys merged in."""
    square, dtype = visible(attributes, q.shape[1]), _result_dtype(attributes, q)
    if square is None:
        return partial.to(dtype, copy=True), partial_lse.clone()
    out, lse = partial.clone(), partial_lse.clone()
    block, block_lse = _forward(attributes, square, q, kv)
    before = lse.narrow(2, square.query, square.queries)
    total = torch.logaddexp(before, block_lse)
    target = _heads(out, attributes).narrow(2, square.query, square.queries)
    target.mul_((before - total).exp().unsqueeze(-1))
    target.addcmul_(block.to(out.dtype), (block_lse - total).exp().unsqueeze(-1))
    before.copy_(total)
    return out.to(dtype), lse


def step_backward(attributes: Attributes, saved: Saved, gradients: Gradients) -> tuple[Tensor, Tensor]:
    """Gradients of queries, and of keys and values, from this step; `out`, `lse` and the gradient are those of all
    steps."""
    q, kv = saved["q"], saved["kv"]
    wide = statistics(q.dtype)
    square = visible(attributes, q.shape[1])
    if square is None:
        return torch.zeros_like(q, dtype=wide), torch.zeros_like(kv, dtype=wide)
    rows, columns = (square.query, square.queries), (square.key, square.keys)
    given = [_heads(x, attributes).narrow(2, *rows) for x in (gradients[0], q, saved["out"])]
    keys, values = (_heads(x, attributes).narrow(2, *columns) for x in kv)
    lse = saved["lse"].narrow(2, *rows).contiguous()
    dq, dk, dv = attention_block_backward(given[0], given[1], keys, values, given[2], lse, square.causal)
    dkv = (torch.empty_like if square.keys == kv.shape[2] else torch.zeros_like)(kv, dtype=wide)
    for whole, gradient in zip(dkv, (dk, dv), strict=True):
        _heads(whole, attributes).narrow(2, *columns).copy_(gradient)
    return _placed(dq, q, rows, attributes, wide), dkv


def _forward(attributes: Attributes, square: Square, q: Tensor, kv: Tensor) -> Partial:
    queries = _heads(q, attributes).narrow(2, square.query, square.queries)
    keys, values = (_heads(x, attributes).narrow(2, square.key, square.keys) for x in kv)
    return attention_block(queries, keys, values, square.causal)


def _placed(
    gradient: Tensor, like: Tensor, place: tuple[int, int], attributes: Attributes, dtype: torch.dtype
) -> Tensor:
    """The gradient of a part, [batch, heads, part, head_dim], in zeros for the rest, in the plan's form."""
    if place[1] == like.shape[1]:
        return gradient.transpose(1, 2).flatten(2).to(dtype).contiguous()
    whole = torch.zeros_like(like, dtype=dtype)
    _heads(whole, attributes).narrow(2, *place).copy_(gradient)
    return whole


def _result_dtype(attributes: Attributes, q: Tensor) -> torch.dtype:
    return q.dtype if attributes["final"] else statistics(q.dtype)


def _heads(x: Tensor, attributes: Attributes) -> Tensor:
    """[batch, length, heads * d] -> [batch, heads, length, d], without a copy."""
    return x.view(x.shape[0], x.shape[1], -1, int(attributes["head_dim"])).transpose(1, 2)


def first_documents(attributes: Attributes, q: Tensor, kv: Tensor, starts: Tensor) -> Partial:
    """`first_step` inside the documents of a packed sequence."""
    dtype, heads = statistics(q.dtype), q.shape[2] // int(attributes["head_dim"])
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full((q.shape[0], heads, q.shape[1]), -torch.inf, dtype=dtype, device=q.device)
    attend(attributes, (q, *kv, starts), _places(attributes, q.shape[1]), out, lse)
    return out.to(_result_dtype(attributes, q)), lse


def next_documents(
    attributes: Attributes, operands: tuple[Tensor, Tensor, Tensor], partial: Tensor, partial_lse: Tensor
) -> Partial:
    """`next_step` inside the documents of a packed sequence."""
    q, kv, starts = operands
    out, lse = partial.clone(), partial_lse.clone()
    attend(attributes, (q, *kv, starts), _places(attributes, partial.shape[1]), out, lse)
    return out.to(_result_dtype(attributes, q)), lse


def documents_backward(attributes: Attributes, saved: Saved, gradients: Gradients) -> tuple[Tensor, Tensor]:
    """`step_backward` inside the documents of a packed sequence."""
    k, v = saved["kv"]
    places = _places(attributes, saved["q"].shape[1])
    dq, dk, dv = attend_backward(attributes, {**saved, "k": k, "v": v}, gradients[0], places)
    return dq, torch.stack((dk, dv))


def _places(attributes: Attributes, length: int) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """Positions of the own queries and of the visiting keys."""
    rank, ring, step = (int(attributes[name]) for name in ("rank", "ring", "step"))
    zigzag = ring if attributes["zigzag"] else 0
    own, visiting = (runs(r * length, length, zigzag, length // 2) for r in (rank, (rank - step) % ring))
    return own, visiting
