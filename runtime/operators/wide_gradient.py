"""The value itself; its gradient arrives in float32 (float64 in a float64 run), a sum of many parts."""

from __future__ import annotations

from titan.runtime.dtypes import DTYPES
from titan.runtime.place import Attributes, Gradients, Place, Saved
from torch import Tensor


def forward(attributes: Attributes, place: Place, x: Tensor) -> tuple[Tensor, ...]:
    """[batch, sequence, width] -> the same tensor."""
    return (x,)


def backward_input(attributes: Attributes, place: Place, saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    return (gradients[0].to(DTYPES[attributes["dtype"]]),)


def backward_weight(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> None:
    return None
