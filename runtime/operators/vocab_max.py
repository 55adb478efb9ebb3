"""The largest logit of each token over this rank's part of the vocabulary; a maximum over ranks completes it.

Columns from `vocab` on (counted from the first column `start`) are padding and are not looked at.
"""

from __future__ import annotations

import torch
from titan.runtime.dtypes import statistics
from titan.runtime.place import Attributes, Gradients, Place, Saved
from titan.runtime.vocabulary import true_columns
from torch import Tensor


def forward(attributes: Attributes, place: Place, logits: Tensor) -> tuple[Tensor, ...]:
    """[batch, sequence, columns] -> [batch, sequence] in float32; minus infinity where all columns are padding."""
    columns, exact = true_columns(attributes, logits.shape[-1]), statistics(logits.dtype)
    if columns == 0:
        return (torch.full(logits.shape[:-1], -torch.inf, dtype=exact, device=logits.device),)
    return (logits[..., :columns].amax(-1).to(exact),)


def backward_input(attributes: Attributes, place: Place, saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    """No gradient: the loss does not depend on the shift that the maximum is used for."""
    return ()


def backward_weight(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> None:
    return None
