"""Causal attention inside the documents of a packed sequence, over keys that begin at its first position."""

from __future__ import annotations

from titan.runtime.attention_squares import attention_of, gradients_of
from titan.runtime.documents import Places, seen
from titan.runtime.place import Attributes, Gradients, Place, Saved
from torch import Tensor


def forward(
    attributes: Attributes, place: Place, q: Tensor, k: Tensor, v: Tensor, starts: Tensor
) -> tuple[Tensor, ...]:
    """q [batch, s, heads * d]; k, v [batch, t, kv_heads * d]; starts [batch, s] -> (out as q, lse)."""
    out, lse = attention_of(attributes, (q, k, v), seen(attributes, _places(attributes, q, k), starts))
    return out.to(q.dtype), lse


def backward_input(attributes: Attributes, place: Place, saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    found = seen(attributes, _places(attributes, saved["q"], saved["k"]), saved["starts"])
    return tuple(d.to(saved["q"].dtype) for d in gradients_of(attributes, saved, gradients[0], found))


def backward_weight(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> None:
    return None


def _places(attributes: Attributes, q: Tensor, k: Tensor) -> Places:
    return ((int(attributes.get("start", 0)), q.shape[1]),), ((0, k.shape[1]),)
