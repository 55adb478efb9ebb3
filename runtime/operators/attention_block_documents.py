"""The first step of ring attention inside documents: own queries against own keys."""

from __future__ import annotations

from titan.runtime.place import Attributes, Gradients, Place, Saved
from titan.runtime.ring_steps import documents_backward, first_documents
from torch import Tensor


def forward(attributes: Attributes, place: Place, q: Tensor, kv: Tensor, starts: Tensor) -> tuple[Tensor, ...]:
    """q [batch, s, heads * d]; kv [2, batch, s, kv_heads * d]; starts [batch, s] -> (out as q, lse)."""
    return first_documents(attributes, q, kv, starts)


def backward_input(attributes: Attributes, place: Place, saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    return documents_backward(attributes, saved, gradients)


def backward_weight(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> None:
    return None
