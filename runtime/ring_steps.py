"""One step of ring attention: the queries of this rank against the keys that are visiting it.

Tensors are [batch, length, heads * head_dim] as in the plan; which queries see which keys follows from the step and the
rank (`titan.compiler.plan.sequence`). Partial results and gradients are float32, or float64 in a float64 run.
"""

from __future__ import annotations

import torch
from titan.compiler.plan.mask import Square
from titan.compiler.plan.sequence import places, visible
from titan.runtime.attention_blocks import attention_block, attention_block_backward
from titan.runtime.attention_squares import attention_of, by_heads, everywhere, gradients_of, merge_into
from titan.runtime.documents import seen
from titan.runtime.dtypes import statistics
from titan.runtime.place import Attributes, Gradients, Saved
from torch import Tensor

Partial = tuple[Tensor, Tensor]  # out [batch, length, heads * head_dim], lse [batch, heads, length]


def first_step(attributes: Attributes, q: Tensor, kv: Tensor) -> Partial:
    """Own queries against own keys."""
    squares, dtype = visible(attributes, q.shape[1]), _result_dtype(attributes, q)
    if len(squares) > 1 or squares[0].repeats > 1:
        out, lse = attention_of(attributes, (q, *kv), everywhere(squares))
        return out.to(dtype), lse
    out, lse = _forward(attributes, squares[0], q, kv)  # the own keys are always seen
    return out.transpose(1, 2).flatten(2).to(dtype).contiguous(), lse


def next_step(attributes: Attributes, q: Tensor, kv: Tensor, partial: Tensor, partial_lse: Tensor) -> Partial:
    """The partial result of the keys so far, with the visiting keys merged in."""
    out, lse = partial.clone(), partial_lse.clone()
    merge_into(attributes, (q, *kv), everywhere(visible(attributes, q.shape[1])), out, lse)
    return out.to(_result_dtype(attributes, q)), lse


def step_backward(attributes: Attributes, saved: Saved, gradients: Gradients) -> tuple[Tensor, Tensor]:
    """Gradients of queries, and of keys and values, from this step; `out`, `lse` and the gradient are those of all
    steps."""
    q, kv = saved["q"], saved["kv"]
    wide = statistics(q.dtype)
    squares = visible(attributes, q.shape[1])
    if len(squares) != 1 or squares[0].late or squares[0].repeats > 1:
        k, v = kv
        dq, dk, dv = gradients_of(attributes, {**saved, "k": k, "v": v}, gradients[0], everywhere(squares))
        return dq, torch.stack((dk, dv))
    (square,) = squares
    rows, columns = (square.query, square.queries), (square.key, square.keys)
    given = [by_heads(x, attributes).narrow(2, *rows) for x in (gradients[0], q, saved["out"])]
    keys, values = (by_heads(x, attributes).narrow(2, *columns) for x in kv)
    lse = saved["lse"].narrow(2, *rows).contiguous()
    dq, dk, dv = attention_block_backward(given[0], given[1], keys, values, given[2], lse, square.causal)
    dkv = (torch.empty_like if square.keys == kv.shape[2] else torch.zeros_like)(kv, dtype=wide)
    for whole, gradient in zip(dkv, (dk, dv), strict=True):
        by_heads(whole, attributes).narrow(2, *columns).copy_(gradient)
    return _placed(dq, q, rows, attributes, wide), dkv


def _forward(attributes: Attributes, square: Square, q: Tensor, kv: Tensor) -> Partial:
    queries = by_heads(q, attributes).narrow(2, square.query, square.queries)
    keys, values = (by_heads(x, attributes).narrow(2, square.key, square.keys) for x in kv)
    return attention_block(queries, keys, values, square.causal)


def _placed(
    gradient: Tensor, like: Tensor, place: tuple[int, int], attributes: Attributes, dtype: torch.dtype
) -> Tensor:
    """The gradient of a part, [batch, heads, part, head_dim], in zeros for the rest, in the plan's form."""
    if place[1] == like.shape[1]:
        return gradient.transpose(1, 2).flatten(2).to(dtype).contiguous()
    whole = torch.zeros_like(like, dtype=dtype)
    by_heads(whole, attributes).narrow(2, *place).copy_(gradient)
    return whole


def _result_dtype(attributes: Attributes, q: Tensor) -> torch.dtype:
    return q.dtype if attributes["final"] else statistics(q.dtype)


def first_documents(attributes: Attributes, q: Tensor, kv: Tensor, starts: Tensor) -> Partial:
    """`first_step` inside the documents of a packed sequence."""
    out, lse = attention_of(attributes, (q, *kv), seen(attributes, places(attributes, q.shape[1]), starts))
    return out.to(_result_dtype(attributes, q)), lse


def next_documents(
    attributes: Attributes, operands: tuple[Tensor, Tensor, Tensor], partial: Tensor, partial_lse: Tensor
) -> Partial:
    """`next_step` inside the documents of a packed sequence."""
    q, kv, starts = operands
    out, lse = partial.clone(), partial_lse.clone()
    merge_into(attributes, (q, *kv), seen(attributes, places(attributes, q.shape[1]), starts), out, lse)
    return out.to(_result_dtype(attributes, q)), lse


def documents_backward(attributes: Attributes, saved: Saved, gradients: Gradients) -> tuple[Tensor, Tensor]:
    """`step_backward` inside the documents of a packed sequence."""
    (k, v), q = saved["kv"], saved["q"]
    found = seen(attributes, places(attributes, q.shape[1]), saved["starts"])
    dq, dk, dv = gradients_of(attributes, {**saved, "k": k, "v": v}, gradients[0], found)
    return dq, torch.stack((dk, dv))
