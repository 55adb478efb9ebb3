"""silu(gate) * up (Shazeer 2020)."""

from __future__ import annotations

import torch
from titan.runtime.place import Attributes, Gradients, Place, Saved
from torch import Tensor


def forward(attributes: Attributes, place: Place, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    """Elementwise on two tensors of one shape."""
    return (torch.nn.functional.silu(gate).mul_(up),)


def backward_input(attributes: Attributes, place: Place, saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    gate, up, dy = saved["gate"], saved["up"], gradients[0]
    return torch.ops.aten.silu_backward(dy * up, gate), torch.nn.functional.silu(gate).mul_(dy)


def backward_weight(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> None:
    return None
