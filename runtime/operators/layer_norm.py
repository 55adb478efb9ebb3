"""Layer norm (Ba, Kiros, Hinton 2016): gain * (x - mean) * rstd + shift, by torch's fused kernels.

Gain and shift are given to the kernel in float32 so that it keeps its statistics in float32 for bfloat16 values.
"""

from __future__ import annotations

import torch
from titan.runtime.dtypes import statistics
from titan.runtime.place import Attributes, Gradients, Place, Saved
from torch import Tensor


def forward(attributes: Attributes, place: Place, x: Tensor, gain: Tensor, shift: Tensor) -> tuple[Tensor, ...]:
    """[batch, sequence, hidden] -> (the same, mean [batch, sequence], rstd [batch, sequence])."""
    exact = _exact(x)
    if gain.dtype != exact:
        gain, shift = gain.to(exact), shift.to(exact)
    out, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], gain, shift, attributes["eps"])
    wanted = statistics(x.dtype)
    mean, rstd = mean.squeeze_(-1), rstd.squeeze_(-1)
    return (out, mean, rstd) if mean.dtype == wanted else (out, mean.to(wanted), rstd.to(wanted))


def backward_input(attributes: Attributes, place: Place, saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    return (_gradients(saved, gradients[0], [True, False, False])[0],)


def backward_weight(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> None:
    _, gain, shift = _gradients(saved, gradients[0], [False, True, True])
    into[0].add_(gain)
    into[1].add_(shift)


def backward(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Both at once, in one pass of the kernel."""
    dx, gain, shift = _gradients(saved, gradients[0], [True, True, True])
    into[0].add_(gain)
    into[1].add_(shift)
    return (dx,)


def _exact(x: Tensor) -> torch.dtype:
    """Dtype of gain and shift in the kernel: the CPU's takes float32 beside bfloat16, the GPU's wants equal ones."""
    return statistics(x.dtype) if x.device.type == "cpu" else x.dtype


def _gradients(saved: Saved, dy: Tensor, wanted: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    x, gain = saved["x"], saved["gain"].to(_exact(saved["x"]))
    mean, rstd = saved["mean"].unsqueeze(-1), saved["rstd"].unsqueeze(-1)
    dx, dgain, dshift = torch.ops.aten.native_layer_norm_backward(dy, x, x.shape[-1:], mean, rstd, gain, gain, wanted)
    return dx, dgain, dshift
