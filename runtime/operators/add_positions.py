"""Adds a learned row per position; this rank's first position is `start`."""

from __future__ import annotations

from titan.runtime.place import Attributes, Gradients, Place, Saved
from torch import Tensor


def forward(attributes: Attributes, place: Place, x: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    """[batch, sequence, hidden] -> the same."""
    return (x + table.narrow(0, int(attributes.get("start", 0)), x.shape[1]),)


def backward_input(attributes: Attributes, place: Place, saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    return (gradients[0],)


def backward_weight(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> None:
    (table,), (dy,) = into, gradients
    table.narrow(0, int(attributes.get("start", 0)), dy.shape[1]).add_(dy.sum(0, dtype=table.dtype))
