"""Sets each element to zero with probability `p` and scales the others by 1 / (1 - p); nothing is saved.

Whether an element stays is a pure function of (seed, step, global sample, layer, site, position, hidden index), so
every layout, micro-batch size and recomputation draws the same mask.
"""

from __future__ import annotations

import torch
from titan.compiler.plan.mask import Run
from titan.runtime.host import to_device
from titan.runtime.place import Attributes, Gradients, Place, Saved
from titan.runtime.positions import positions, runs_of
from titan.runtime.random import bits, key
from torch import Tensor


def forward(attributes: Attributes, place: Place, x: Tensor) -> tuple[Tensor, ...]:
    """[batch, sequence, hidden] -> the same; row b is sample `place.samples[b]`, places count from `start`."""
    return (_dropped(attributes, place, x),)


def backward_input(attributes: Attributes, place: Place, saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    return (_dropped(attributes, place, gradients[0]),)


def backward_weight(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> None:
    return None


def _dropped(attributes: Attributes, place: Place, x: Tensor) -> Tensor:
    p = float(attributes["p"])
    if p == 0.0 or not place.training:
        return x
    found = runs_of(attributes, x.shape[1])
    dropped = ~kept(place, attributes.get("site", ""), p, found, x.shape[2], x.device)
    return (x * (1.0 / (1.0 - p))).masked_fill_(dropped, 0.0)


def kept(place: Place, site: str | int, p: float, found: tuple[Run, ...], width: int, device: torch.device) -> Tensor:
    """Mask [samples, positions of the runs, width] of the elements that stay; one 64-bit word serves two neighbours in
    the width."""
    layer = -1 if place.layer is None else place.layer
    keys = [key(place.seed, "dropout", place.step, sample, layer, site) for sample in place.samples]
    words = (width + 1) // 2
    counters = positions(tuple((start * words, length * words) for start, length in found), device)
    counters = counters.view(1, -1, words)
    lanes = bits(to_device(torch.tensor(keys), device).view(-1, 1, 1), counters).view(torch.int32)
    return lanes[..., :width] >= round(p * 2**32) - 2**31
