"""a + b."""

from __future__ import annotations

from titan.runtime.place import Attributes, Gradients, Place, Saved
from torch import Tensor


def forward(attributes: Attributes, place: Place, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """Elementwise on two tensors of one shape."""
    return (a + b,)


def backward_input(attributes: Attributes, place: Place, saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    return gradients[0], gradients[0]


def backward_weight(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> None:
    return None
