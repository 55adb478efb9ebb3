"""A further step of ring attention: the visiting keys merged into the partial result by their log-sum-exps."""

from __future__ import annotations

from titan.runtime.place import Attributes, Gradients, Place, Saved
from titan.runtime.ring_steps import next_step, step_backward
from torch import Tensor


def forward(
    attributes: Attributes, place: Place, q: Tensor, kv: Tensor, partial: Tensor, partial_lse: Tensor
) -> tuple[Tensor, ...]:
    """q and partial [batch, s, heads * d]; kv [2, batch, s, kv_heads * d] -> (out as q, lse [batch, heads, s])."""
    return next_step(attributes, q, kv, partial, partial_lse)


def backward_input(attributes: Attributes, place: Place, saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    return step_backward(attributes, saved, gradients)


def backward_weight(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> None:
    return None
