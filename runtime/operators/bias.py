"""Adds a vector to the last dim."""

from __future__ import annotations

from functools import lru_cache

import torch
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
    """Rows are summed as a product with ones, which is faster than a sum over the first dims and adds in place."""
    (bias,), dy = into, gradients[0].flatten(0, 1)
    if dy.dtype == bias.dtype:
        bias.addmv_(dy.t(), _ones(dy.shape[0], dy.dtype, dy.device))
    else:
        bias.add_(dy.sum(0, dtype=bias.dtype))


@lru_cache(maxsize=8)
def _ones(rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(rows, dtype=dtype, device=device)
