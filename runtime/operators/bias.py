"""Adds a vector to the last dim."""

from __future__ import annotations

from titan.runtime.place import Attributes, Gradients, Place, Saved
from torch import Tensor


def forward(attributes: Attributes, place: Place, x: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """[batch, sequence, n] + [n]."""
    return (x + bias,)


def backward_input(attributes: Attributes, place: Place, saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    return (gradients[0],)


def backward_weight(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> None:
    into[0].add_(gradients[0].sum((0, 1), dtype=into[0].dtype))
