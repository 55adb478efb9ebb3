"""The first step of ring attention: own queries against own keys, with the log-sum-exp."""

from __future__ import annotations

from titan.runtime.place import Attributes, Gradients, Place, Saved
from titan.runtime.ring_steps import first_step, step_backward
from torch import Tensor


def forward(attributes: Attributes, place: Place, q: Tensor, kv: Tensor) -> tuple[Tensor, ...]:
    """q [batch, s, heads * d]; kv [2, batch, s, kv_heads * d] -> (out as q, lse [batch, heads, s])."""
    return first_step(attributes, q, kv)


def backward_input(attributes: Attributes, place: Place, saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    return step_backward(attributes, saved, gradients)


def backward_weight(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> None:
    return None
