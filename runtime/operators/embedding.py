"""Rows of a table chosen by token; the table may be a shard of the vocabulary that starts at row `start`."""

from __future__ import annotations

import torch
from titan.runtime.place import Attributes, Gradients, Place, Saved
from torch import Tensor


def _rows(attributes: Attributes, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Local row of each token, and which tokens live on another shard (their row here is 0)."""
    rows = tokens - int(attributes.get("start", 0))
    elsewhere = (rows < 0) | (rows >= count)
    return rows.masked_fill_(elsewhere, 0), elsewhere


def forward(attributes: Attributes, place: Place, tokens: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    """[batch, sequence] -> [batch, sequence, hidden]; zero for tokens of other shards, so that a sum completes it."""
    rows, elsewhere = _rows(attributes, tokens, table.shape[0])
    return (torch.embedding(table, rows).masked_fill_(elsewhere.unsqueeze(-1), 0.0),)


def backward_input(attributes: Attributes, place: Place, saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    return ()


def backward_weight(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> None:
    (table,) = into
    rows, elsewhere = _rows(attributes, saved["tokens"], table.shape[0])
    added = gradients[0]
    if table.device.type != "cpu" or bool(elsewhere.any()):  # a device is not asked: that would wait for it
        added = added.to(table.dtype, copy=True).masked_fill_(elsewhere.unsqueeze(-1), 0.0)
    rows, added = rows.flatten(), added.flatten(0, 1)
    if table.device.type == "cpu":
        table.index_add_(0, rows, added.to(table.dtype))
    else:  # sorted: the same sum every time
        table.index_put_((rows,), added, accumulate=True)
