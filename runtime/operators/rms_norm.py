"""Root-mean-square norm (Zhang and Sennrich 2019): gain * x * rstd with rstd = 1 / sqrt(mean(x^2) + eps).

With t = dy * gain: dx = rstd * (t - x * rstd^2 * mean(t * x)), dgain = sum over rows of dy * x * rstd.
"""

from __future__ import annotations

import torch
from titan.runtime.dtypes import statistics
from titan.runtime.place import Attributes, Gradients, Place, Saved
from torch import Tensor


def forward(attributes: Attributes, place: Place, x: Tensor, gain: Tensor) -> tuple[Tensor, ...]:
    """[batch, sequence, hidden] -> (the same, rstd [batch, sequence] in float32)."""
    exact = statistics(x.dtype)
    wide = x.to(exact)
    rstd = torch.linalg.vector_norm(wide, dim=-1).square_().div_(x.shape[-1]).add_(float(attributes["eps"])).rsqrt_()
    return (wide * rstd.unsqueeze(-1)).mul_(gain).to(x.dtype), rstd


def backward_input(attributes: Attributes, place: Place, saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    return (_input(saved, gradients[0], _product(saved, gradients[0])),)


def backward_weight(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> None:
    _weight(saved, _product(saved, gradients[0]), into[0])


def backward(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Both at once: they share dy * x."""
    product = _product(saved, gradients[0])
    _weight(saved, product, into[0])
    return (_input(saved, gradients[0], product),)


def _product(saved: Saved, dy: Tensor) -> Tensor:
    exact = saved["rstd"].dtype
    return dy.to(exact) * saved["x"].to(exact)


def _weight(saved: Saved, product: Tensor, gain: Tensor) -> None:
    gain.addmv_(product.flatten(0, 1).t(), saved["rstd"].flatten())


def _input(saved: Saved, dy: Tensor, product: Tensor) -> Tensor:
    rstd, x, gain = saved["rstd"], saved["x"], saved["gain"]
    exact = rstd.dtype
    inner = torch.mv(product.flatten(0, 1), gain.to(exact)).view_as(rstd).div_(x.shape[-1]).mul_(rstd.pow(3))
    dx = (dy.to(exact) * gain).mul_(rstd.unsqueeze(-1))
    return dx.addcmul_(x.to(exact), inner.unsqueeze(-1), value=-1.0).to(x.dtype)
