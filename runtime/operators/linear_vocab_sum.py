"""`linear` and `vocab_sum` in one: the logits are formed in pieces, forward and again backward, and never kept.

So the memory of the loss is that of `rows` tokens, however long the sequence is.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from titan.runtime.operators import linear, vocab_sum
from titan.runtime.place import Attributes, Gradients, Place, Saved
from titan.runtime.vocabulary import rows_at_once
from torch import Tensor


def forward(
    attributes: Attributes, place: Place, x: Tensor, weight: Tensor, labels: Tensor, peak: Tensor
) -> tuple[Tensor, ...]:
    """[batch, sequence, in], [words, in], [batch, sequence] twice -> (total, target), each [batch, sequence]."""
    total, target = torch.empty_like(peak), torch.empty_like(peak)
    rows, words, peaks = x.flatten(0, 1), labels.flatten(), peak.flatten()
    for part in rows_at_once(attributes, rows.shape[0]):
        logits = torch.nn.functional.linear(rows[part], weight)
        given = (logits.unsqueeze(0), words[part].unsqueeze(0), peaks[part].unsqueeze(0))
        found = vocab_sum.forward(attributes, place, *given)
        total.view(-1)[part], target.view(-1)[part] = found[0][0], found[1][0]
    return total, target


def _parts(attributes: Attributes, place: Place, saved: Saved, gradients: Gradients) -> Iterator[tuple[slice, Tensor]]:
    """Rows, and the gradient of their logits [1, rows, words]."""
    rows, words, peaks = saved["x"].flatten(0, 1), saved["labels"].flatten(), saved["peak"].flatten()
    d_total, d_target = (g.flatten() for g in gradients)
    for part in rows_at_once(attributes, rows.shape[0]):
        logits = torch.nn.functional.linear(rows[part], saved["weight"])
        kept = {"logits": logits.unsqueeze(0), "labels": words[part].unsqueeze(0), "peak": peaks[part].unsqueeze(0)}
        given = (d_total[part].unsqueeze(0), d_target[part].unsqueeze(0))
        yield part, vocab_sum.backward_input(attributes, place, kept, given)[0]


def backward(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Both gradients from one pass over the logits."""
    rows, dx = saved["x"].flatten(0, 1), torch.empty_like(saved["x"], memory_format=torch.contiguous_format)
    for part, d_logits in _parts(attributes, place, saved, gradients):
        dx.flatten(0, 1)[part] = torch.matmul(d_logits[0], saved["weight"])
        linear.backward_weight(attributes, place, {"x": rows[part].unsqueeze(0)}, (d_logits,), into)
    return (dx,)


def backward_input(attributes: Attributes, place: Place, saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    dx = torch.empty_like(saved["x"], memory_format=torch.contiguous_format)
    for part, d_logits in _parts(attributes, place, saved, gradients):
        dx.flatten(0, 1)[part] = torch.matmul(d_logits[0], saved["weight"])
    return (dx,)


def backward_weight(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> None:
    rows = saved["x"].flatten(0, 1)
    for part, d_logits in _parts(attributes, place, saved, gradients):
        linear.backward_weight(attributes, place, {"x": rows[part].unsqueeze(0)}, (d_logits,), into)
