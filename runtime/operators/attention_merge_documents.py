"""A further step of ring attention inside documents: the visiting keys that belong to the queries' documents."""

from __future__ import annotations

from titan.runtime.place import Attributes, Gradients, Place, Saved
from titan.runtime.ring_steps import documents_backward, next_documents
from torch import Tensor


def forward(
    attributes: Attributes, place: Place, q: Tensor, kv: Tensor, starts: Tensor,
    partial: Tensor, partial_lse: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """q and partial [batch, s, heads * d]; kv [2, batch, s, kv_heads * d]; starts [batch, s] -> (out as q, lse)."""
    return next_documents(attributes, (q, kv, starts), partial, partial_lse)


def backward_input(attributes: Attributes, place: Place, saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    return documents_backward(attributes, saved, gradients)


def backward_weight(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> None:
    return None
