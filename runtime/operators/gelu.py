"""Gaussian error linear unit (Hendrycks and Gimpel 2016); `approximate` is none or tanh."""

from __future__ import annotations

import torch
from titan.runtime.place import Attributes, Gradients, Place, Saved
from torch import Tensor

_backward = torch.ops.aten.gelu_backward.default


def forward(attributes: Attributes, place: Place, x: Tensor) -> tuple[Tensor, ...]:
    """Elementwise."""
    return (torch.nn.functional.gelu(x, approximate=attributes.get("approximate", "none")),)


def backward_input(attributes: Attributes, place: Place, saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    kind = attributes.get("approximate", "none")
    return (_backward(gradients[0], saved["x"], approximate=kind),)


def backward_weight(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> None:
    return None
