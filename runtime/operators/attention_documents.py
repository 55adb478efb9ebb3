"""Causal attention inside the documents of a packed sequence, over keys that begin at its first position."""

from __future__ import annotations

import torch
from titan.compiler.plan.sequence import Run
from titan.runtime.documents import attend, attend_backward
from titan.runtime.dtypes import statistics
from titan.runtime.place import Attributes, Gradients, Place, Saved
from torch import Tensor


def forward(
    attributes: Attributes, place: Place, q: Tensor, k: Tensor, v: Tensor, starts: Tensor
) -> tuple[Tensor, ...]:
    """q [batch, s, heads * d]; k, v [batch, t, kv_heads * d]; starts [batch, s] -> (out as q, lse)."""
    dtype, heads = statistics(q.dtype), q.shape[2] // int(attributes["head_dim"])
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full((q.shape[0], heads, q.shape[1]), -torch.inf, dtype=dtype, device=q.device)
    attend(attributes, (q, k, v, starts), _places(attributes, q, k), out, lse)
    return out.to(q.dtype), lse


def backward_input(attributes: Attributes, place: Place, saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    places = _places(attributes, saved["q"], saved["k"])
    return tuple(d.to(saved["q"].dtype) for d in attend_backward(attributes, saved, gradients[0], places))


def backward_weight(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> None:
    return None


def _places(attributes: Attributes, q: Tensor, k: Tensor) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    return ((int(attributes.get("start", 0)), q.shape[1]),), ((0, k.shape[1]),)
