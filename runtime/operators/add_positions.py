"""Adds a learned row per position; this rank's first place is `start`."""

from __future__ import annotations

import torch
from titan.runtime.place import Attributes, Gradients, Place, Saved
from titan.runtime.positions import runs_of
from torch import Tensor


def forward(attributes: Attributes, place: Place, x: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    """[batch, sequence, hidden] -> the same."""
    rows = [table.narrow(0, *run) for run in runs_of(attributes, x.shape[1])]
    return (x + (rows[0] if len(rows) == 1 else torch.cat(rows)),)


def backward_input(attributes: Attributes, place: Place, saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    return (gradients[0],)


def backward_weight(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> None:
    (table,), (dy,) = into, gradients
    first = 0
    for start, length in runs_of(attributes, dy.shape[1]):
        table.narrow(0, start, length).add_(dy.narrow(1, first, length).sum(0, dtype=table.dtype))
        first += length
