"""Adds a learned row per position, counted from the beginning of each token's document."""

from __future__ import annotations

from titan.runtime.place import Attributes, Gradients, Place, Saved
from titan.runtime.positions import positions, runs_of
from torch import Tensor


def forward(attributes: Attributes, place: Place, x: Tensor, table: Tensor, starts: Tensor) -> tuple[Tensor, ...]:
    """[batch, sequence, hidden] -> the same; starts [batch, sequence]."""
    return (x + table[_counted(attributes, starts, table)],)


def backward_input(attributes: Attributes, place: Place, saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    return (gradients[0],)


def backward_weight(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> None:
    (table,), (dy,) = into, gradients
    rows = _counted(attributes, saved["starts"], table).flatten()
    table.index_add_(0, rows, dy.flatten(0, 1).to(table.dtype))


def _counted(attributes: Attributes, starts: Tensor, table: Tensor) -> Tensor:
    """Position inside the document; of places that fill a sequence up, at most the last row."""
    found = positions(runs_of(attributes, starts.shape[1]), starts.device) - starts
    return found.clamp(max=table.shape[0] - 1)
