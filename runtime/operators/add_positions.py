"""Adds a learned row per position; this rank's first place is `start`.

Places beyond the table, with which a sequence is filled up, get nothing.
"""

from __future__ import annotations

import torch
from titan.runtime.place import Attributes, Gradients, Place, Saved
from titan.runtime.positions import runs_of
from torch import Tensor
from torch.nn.functional import pad


def forward(attributes: Attributes, place: Place, x: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    """[batch, sequence, hidden] -> the same."""
    rows = [_rows(table, start, length) for start, length in runs_of(attributes, x.shape[1])]
    return (x + (rows[0] if len(rows) == 1 else torch.cat(rows)),)


def backward_input(attributes: Attributes, place: Place, saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    return (gradients[0],)


def backward_weight(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> None:
    (table,), (dy,) = into, gradients
    first = 0
    for start, length in runs_of(attributes, dy.shape[1]):
        rows = table[start : start + length]
        rows.add_(dy.narrow(1, first, len(rows)).sum(0, dtype=table.dtype))
        first += length


def _rows(table: Tensor, start: int, length: int) -> Tensor:
    found = table[start : start + length]
    return found if len(found) == length else pad(found, (0, 0, 0, length - len(found)))
