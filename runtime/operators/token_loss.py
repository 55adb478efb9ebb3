"""The loss of the tokens of a micro-batch, divided by the number of valid labels of the whole step.

kind = cross_entropy: log(total) + peak - target, that is minus the log-probability of the label.
kind = linear: minus the label's logit; linear in the logits, so that exact arithmetic stays exact.
Tokens with label -100 count nothing.
"""

from __future__ import annotations

import torch
from titan.runtime.place import Attributes, Gradients, Place, Saved
from torch import Tensor


def forward(
    attributes: Attributes, place: Place, peak: Tensor, total: Tensor, target: Tensor, labels: Tensor, count: Tensor
) -> tuple[Tensor, ...]:
    """Five of [batch, sequence] (`count` a scalar) -> scalar. A step without any valid label has loss zero."""
    losses = -target if attributes.get("kind") == "linear" else total.log().add_(peak).sub_(target)
    return (losses.masked_fill_(labels < 0, 0.0).sum() / count.clamp(min=1),)


def backward_input(attributes: Attributes, place: Place, saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    total, labels = saved["total"], saved["labels"]
    share = torch.where(labels < 0, 0.0, gradients[0] / saved["count"].clamp(min=1)).to(total.dtype)
    d_total = torch.zeros_like(total) if attributes.get("kind") == "linear" else share / total
    return d_total, -share


def backward_weight(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> None:
    return None
