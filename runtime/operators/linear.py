"""x times the transpose of a weight [out, in]; with it, in one kernel, a bias and a sum that follow."""

from __future__ import annotations

import torch
from titan.runtime.matrix import rows_by, rows_by_transpose
from titan.runtime.place import Attributes, Gradients, Place, Saved
from torch import Tensor

_ROWS = 4096  # rows converted to float32 at once where there is no mixed matrix product


def forward(attributes: Attributes, place: Place, x: Tensor, weight: Tensor, *added: Tensor) -> tuple[Tensor, ...]:
    """[batch, sequence, in] -> [batch, sequence, out]. `added`: a bias [out], a tensor like the result, or both, of the
    calls that follow in a chain."""
    bias = added[0] if added and added[0].dim() == 1 else None
    rest = added[bias is not None :]
    return (rows_by_transpose(x, weight, bias, rest[0] if rest else None),)


def backward_input(attributes: Attributes, place: Place, saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    return (rows_by(gradients[0], saved["weight"]),)


def backward_onto(attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, added: Tensor) -> Tensor:
    """The input gradient plus what other readers gave, in one kernel."""
    return rows_by(gradients[0], saved["weight"], added)


def backward_weight(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> None:
    """Accumulates in the dtype of the gradient buffer also when the operands are bfloat16."""
    (gradient,) = into
    dy, x = gradients[0].flatten(0, 1), saved["x"].flatten(0, 1)
    if dy.dtype == gradient.dtype:
        gradient.addmm_(dy.t(), x)
    elif dy.device.type == "cuda":
        torch.addmm(gradient, dy.t(), x, out_dtype=gradient.dtype, out=gradient)
    else:
        for first in range(0, dy.shape[0], _ROWS):
            rows = slice(first, first + _ROWS)
            gradient.addmm_(dy[rows].to(gradient.dtype).t(), x[rows].to(gradient.dtype))
