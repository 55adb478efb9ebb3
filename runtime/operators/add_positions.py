"""Adds a learned row per position; this rank's first place is `start`.

Places beyond the table, with which a sequence is filled up, get nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from titan.runtime.place import Attributes, Gradients, Place, Saved
from titan.runtime.positions import runs_of
from torch import Tensor


def forward(attributes: Attributes, place: Place, x: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    """[batch, sequence, hidden] -> the same."""
    out = x.new_empty(x.shape)
    for here, beyond, rows in _stretches(attributes, x.shape[1], table):
        torch.add(x[:, here], rows, out=out[:, here])
        out[:, beyond] = x[:, beyond]
    return (out,)


def backward_input(attributes: Attributes, place: Place, saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    return (gradients[0],)


def backward_weight(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> None:
    (table,), (dy,) = into, gradients
    for here, _, rows in _stretches(attributes, dy.shape[1], table):
        for sample in dy:  # one after the other: no sum of them is formed
            rows.add_(sample[here])


def _stretches(attributes: Attributes, length: int, table: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Of each run of positions the places that have a row, those beyond the table, and the rows."""
    first = 0
    for start, number in runs_of(attributes, length):
        rows = table[start : start + number]
        last = first + len(rows)
        yield slice(first, last), slice(last, first + number), rows
        first += number
