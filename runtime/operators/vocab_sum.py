"""What each token's loss needs of this rank's part of the vocabulary; sums over ranks complete both results.

total = sum of exp(logit - peak), target = the label's logit (0 where the label is another rank's or is ignored).
Backward: dlogit = dtotal * exp(logit - peak), plus dtarget at the label. Rows are taken in pieces that stay in cache.
"""

from __future__ import annotations

import torch
from titan.runtime.dtypes import statistics
from titan.runtime.place import Attributes, Gradients, Place, Saved
from titan.runtime.vocabulary import true_columns
from torch import Tensor

_CHUNK = 1 << 18  # elements per piece on a CPU; a GPU takes far larger ones


def forward(attributes: Attributes, place: Place, logits: Tensor, labels: Tensor, peak: Tensor) -> tuple[Tensor, ...]:
    """[batch, sequence, columns], [batch, sequence] twice -> (total, target), each [batch, sequence] in float32."""
    columns, exact = true_columns(attributes, logits.shape[-1]), statistics(logits.dtype)
    rows, peaks = logits.flatten(0, 1)[:, :columns], peak.flatten()
    total = torch.empty_like(peaks)
    for chunk in _chunks(rows):
        shifted = rows[chunk].to(exact) - peaks[chunk].unsqueeze(1)
        torch.sum(shifted.exp_(), 1, out=total[chunk])
    label, elsewhere = _labels(attributes, labels, columns)
    if columns == 0:
        return total.view_as(peak), torch.zeros_like(peak)
    target = rows.gather(1, label.unsqueeze(1)).squeeze(1).to(exact).masked_fill_(elsewhere, 0.0)
    return total.view_as(peak), target.view_as(peak)


def backward_input(attributes: Attributes, place: Place, saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    logits, peaks = saved["logits"], saved["peak"].flatten()
    columns, exact = true_columns(attributes, logits.shape[-1]), statistics(logits.dtype)
    rows, dlogits = logits.flatten(0, 1)[:, :columns], torch.empty_like(logits, memory_format=torch.contiguous_format)
    out, d_total, d_target = dlogits.flatten(0, 1), gradients[0].flatten(), gradients[1].flatten()
    out[:, columns:] = 0.0
    if columns == 0:
        return (dlogits,)
    label, elsewhere = _labels(attributes, saved["labels"], columns)
    d_target = d_target.masked_fill(elsewhere, 0.0)
    for chunk in _chunks(rows):
        target = out[chunk, :columns]
        piece = target if target.dtype == exact else torch.empty_like(target, dtype=exact)
        torch.sub(rows[chunk], peaks[chunk].unsqueeze(1), out=piece)
        piece.exp_().mul_(d_total[chunk].unsqueeze(1))
        piece.scatter_add_(1, label[chunk].unsqueeze(1), d_target[chunk].unsqueeze(1))
        if piece is not target:
            target.copy_(piece)
    return (dlogits,)


def backward_weight(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> None:
    return None


def _chunks(rows: Tensor) -> list[slice]:
    elements = _CHUNK if rows.device.type == "cpu" else _CHUNK << 6
    step = max(1, elements // max(1, rows.shape[1]))
    return [slice(first, first + step) for first in range(0, rows.shape[0], step)]


def _labels(attributes: Attributes, labels: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Local column of each label, flat, and which labels are not here (their column is given as 0)."""
    label = labels.flatten() - int(attributes.get("start", 0))
    elsewhere = (labels.flatten() < 0) | (label < 0) | (label >= columns)
    return label.masked_fill_(elsewhere, 0), elsewhere
