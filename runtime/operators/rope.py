"""Rotary position embedding (Su et al. 2021), halves turned against each other as in Llama's published weights.

For head dims d and d + D/2 of position p: the pair is turned by p * theta^(-2d/D). Llama-3 scaling (`factor`, `low`,
`high`, `original`) divides slow frequencies by `factor`, keeps fast ones and interpolates between.
"""

from __future__ import annotations

from functools import lru_cache
from math import pi

import torch
from titan.compiler.plan.mask import Run
from titan.runtime.dtypes import statistics
from titan.runtime.place import Attributes, Gradients, Place, Saved
from titan.runtime.positions import positions, runs_of
from torch import Tensor

Scaling = tuple[float, float, float, float]


def forward(attributes: Attributes, place: Place, x: Tensor) -> tuple[Tensor, ...]:
    """[batch, sequence, heads * head_dim] -> the same; places count from `start`."""
    return (_turn(attributes, x, 1),)


def backward_input(attributes: Attributes, place: Place, saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    return (_turn(attributes, gradients[0], -1),)


def backward_weight(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> None:
    return None


def _turn(attributes: Attributes, x: Tensor, direction: int) -> Tensor:
    width = int(attributes["head_dim"])
    heads = x.view(*x.shape[:-1], -1, width)
    found, theta = runs_of(attributes, x.shape[1]), float(attributes["theta"])
    cosine, sine = _table(found, width, theta, _scaling(attributes), direction, statistics(x.dtype), str(x.device))
    half = width // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), -1)
    return (heads * cosine).addcmul_(swapped, sine).to(x.dtype).view(x.shape)


def _scaling(attributes: Attributes) -> Scaling | None:
    if "factor" not in attributes:
        return None
    return tuple(float(attributes[name]) for name in ("factor", "low", "high", "original"))  # type: ignore[return-value]


@lru_cache(maxsize=64)
def _table(
    found: tuple[Run, ...],
    width: int,
    theta: float,
    scaling: Scaling | None,
    direction: int,
    dtype: torch.dtype,
    device: str,
) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine [length, 1, head_dim], formed in float64 so that late positions stay exact."""
    turns = frequencies(width, theta, scaling)
    angles = positions(found).to(torch.float64).unsqueeze(1) * turns
    cosine, sine = angles.cos(), angles.sin() * direction
    whole = torch.cat((cosine, cosine), -1), torch.cat((-sine, sine), -1)
    return tuple(t.unsqueeze(1).to(device=device, dtype=dtype) for t in whole)  # type: ignore[return-value]


def frequencies(width: int, theta: float, scaling: Scaling | None) -> Tensor:
    """Radians per position of each pair, float64 [width / 2]."""
    turns = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    if scaling is None:
        return turns
    factor, low, high, original = scaling
    waves = original * turns / (2 * pi)  # full turns within the original context
    smooth = ((waves - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * turns / factor + smooth * turns
