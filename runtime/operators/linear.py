"""x times the transpose of a weight [out, in]."""

from __future__ import annotations

import torch
from titan.runtime.place import Attributes, Gradients, Place, Saved
from torch import Tensor

_ROWS = 4096  # rows converted to float32 at once where there is no mixed matrix product


def forward(attributes: Attributes, place: Place, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """[batch, sequence, in] -> [batch, sequence, out]."""
    return (torch.nn.functional.linear(x, weight),)


def backward_input(attributes: Attributes, place: Place, saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    return (torch.matmul(gradients[0], saved["weight"]),)


def backward_weight(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> None:
    """Accumulates in the dtype of the gradient buffer also when the operands are bfloat16."""
    (gradient,) = into
    dy, x = gradients[0].flatten(0, 1), saved["x"].flatten(0, 1)
    if dy.dtype == gradient.dtype:
        gradient.addmm_(dy.t(), x)
    elif dy.device.type == "cuda":
        gradient.add_(torch.mm(dy.t(), x, out_dtype=gradient.dtype))
    else:
        for first in range(0, dy.shape[0], _ROWS):
            rows = slice(first, first + _ROWS)
            gradient.addmm_(dy[rows].to(gradient.dtype).t(), x[rows].to(gradient.dtype))
