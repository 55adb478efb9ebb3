"""max(x, 0); the backward needs only the output."""

from __future__ import annotations

import torch
from titan.runtime.place import Attributes, Gradients, Place, Saved
from torch import Tensor


def forward(attributes: Attributes, place: Place, x: Tensor) -> tuple[Tensor, ...]:
    """Elementwise."""
    return (torch.relu(x),)


def backward_input(attributes: Attributes, place: Place, saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    return (torch.ops.aten.threshold_backward(gradients[0], saved["out"], 0),)


def backward_weight(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> None:
    return None
