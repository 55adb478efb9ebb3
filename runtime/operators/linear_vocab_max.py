"""The largest logit of each token over this rank's words; the logits are formed in pieces and not kept."""

from __future__ import annotations

import torch
from titan.runtime.dtypes import statistics
from titan.runtime.operators import vocab_max
from titan.runtime.place import Attributes, Gradients, Place, Saved
from titan.runtime.vocabulary import rows_at_once
from torch import Tensor


def forward(attributes: Attributes, place: Place, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """[batch, sequence, in], [words, in] -> [batch, sequence] in float32."""
    rows = x.flatten(0, 1)
    peak = torch.empty(rows.shape[0], dtype=statistics(x.dtype), device=x.device)
    for part in rows_at_once(attributes, rows.shape[0]):
        logits = torch.nn.functional.linear(rows[part], weight)
        peak[part] = vocab_max.forward(attributes, place, logits.unsqueeze(0))[0][0]
    return (peak.view(x.shape[:-1]),)


def backward_input(attributes: Attributes, place: Place, saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    """No gradient, as for `vocab_max`."""
    return ()


def backward_weight(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> None:
    return None
