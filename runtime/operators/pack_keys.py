"""Keys and values as one tensor, to be passed on together; the gradient arrives wide, as for `wide_gradient`."""

from __future__ import annotations

import torch
from titan.runtime.dtypes import DTYPES
from titan.runtime.place import Attributes, Gradients, Place, Saved
from torch import Tensor


def forward(attributes: Attributes, place: Place, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Two of [batch, sequence, width] -> [2, batch, sequence, width]."""
    return (torch.stack((k, v)),)


def backward_input(attributes: Attributes, place: Place, saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    return gradients[0].to(DTYPES[attributes["dtype"]]).unbind()


def backward_weight(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> None:
    return None
