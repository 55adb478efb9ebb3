"""One step of ring attention: the queries of this rank against the keys that are visiting it.

Tensors are [batch, length, heads * head_dim] as in the plan; which queries see which keys follows from the step and the
rank (`titan.compiler.plan.sequence`). Partial results and gradients are float32, or float64 in a float64 run.
"""

from __future__ import annotations

import torch
from titan.compiler.plan.sequence import places, visible
from titan.runtime.attention_squares import Seen, attention_of, everywhere, gradients_of, merge_into
from titan.runtime.documents import seen
from titan.runtime.dtypes import statistics
from titan.runtime.place import Attributes, Gradients, Saved
from torch import Tensor

Partial = tuple[Tensor, Tensor]  # out [batch, length, heads * head_dim], lse [batch, heads, length]


def first_step(attributes: Attributes, q: Tensor, kv: Tensor) -> Partial:
    """Own queries against own keys."""
    return _first(attributes, q, kv, everywhere(visible(attributes, q.shape[1])))


def next_step(attributes: Attributes, q: Tensor, kv: Tensor, partial: Tensor, partial_lse: Tensor) -> Partial:
    """The partial result of the keys so far, with the visiting keys merged in."""
    return _next(attributes, q, kv, everywhere(visible(attributes, q.shape[1])), (partial, partial_lse))


def step_backward(attributes: Attributes, saved: Saved, gradients: Gradients) -> tuple[Tensor, Tensor]:
    """Gradients of queries, and of keys and values, from this step; `out`, `lse` and the gradient are those of all
    steps."""
    return _backward(attributes, saved, gradients[0], everywhere(visible(attributes, saved["q"].shape[1])))


def first_documents(attributes: Attributes, q: Tensor, kv: Tensor, starts: Tensor) -> Partial:
    """`first_step` inside the documents of a packed sequence."""
    return _first(attributes, q, kv, seen(attributes, places(attributes, q.shape[1]), starts))


def next_documents(
    attributes: Attributes, operands: tuple[Tensor, Tensor, Tensor], partial: Tensor, partial_lse: Tensor
) -> Partial:
    """`next_step` inside the documents of a packed sequence."""
    q, kv, starts = operands
    found = seen(attributes, places(attributes, q.shape[1]), starts)
    return _next(attributes, q, kv, found, (partial, partial_lse))


def documents_backward(attributes: Attributes, saved: Saved, gradients: Gradients) -> tuple[Tensor, Tensor]:
    """`step_backward` inside the documents of a packed sequence."""
    found = seen(attributes, places(attributes, saved["q"].shape[1]), saved["starts"])
    return _backward(attributes, saved, gradients[0], found)


def _first(attributes: Attributes, q: Tensor, kv: Tensor, found: Seen) -> Partial:
    out, lse = attention_of(attributes, (q, *kv), found)
    return out.to(_result_dtype(attributes, q)), lse


def _next(attributes: Attributes, q: Tensor, kv: Tensor, found: Seen, partial: Partial) -> Partial:
    out, lse = (x.clone() for x in partial)
    merge_into(attributes, (q, *kv), found, out, lse)
    return out.to(_result_dtype(attributes, q)), lse


def _backward(attributes: Attributes, saved: Saved, gradient: Tensor, found: Seen) -> tuple[Tensor, Tensor]:
    kv = saved["kv"]
    dkv = torch.zeros_like(kv, dtype=statistics(kv.dtype), memory_format=torch.contiguous_format)
    dq, *_ = gradients_of(attributes, {**saved, "k": kv[0], "v": kv[1]}, gradient, found, dkv)
    return dq.to(dkv.dtype), dkv


def _result_dtype(attributes: Attributes, q: Tensor) -> torch.dtype:
    return q.dtype if attributes["final"] else statistics(q.dtype)
