"""Several documents in one sequence: where each begins, and attention that does not cross from one to the next.

A document ends with the separator token. What a token needs to know is the place at which its document starts: its
query sees the keys from there up to itself. The keys need to know nothing, so rings carry nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from titan.compiler.plan.sequence import Run, Square
from titan.runtime.attention_blocks import attention_block, attention_block_backward
from titan.runtime.data import IGNORED, TokenSource
from titan.runtime.dtypes import statistics
from titan.runtime.place import Attributes, Saved
from titan.runtime.positions import positions
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """A source whose documents end with `separator`: what follows a separator is no label of it."""

    inner: TokenSource
    separator: int

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def vocabulary(self) -> int:
        return self.inner.vocabulary

    @property
    def tokens(self) -> int:
        return self.inner.tokens

    @property
    def samples(self) -> int:
        return self.inner.samples

    def load(self, indices: Sequence[int], start: int, stop: int) -> tuple[Tensor, Tensor]:
        tokens, labels = self.inner.load(indices, start, stop)
        return tokens, labels.masked_fill(tokens == self.separator, IGNORED)

    def unigram_entropy(self) -> float:
        return self.inner.unigram_entropy()

    def starts(self, indices: Sequence[int], found: tuple[Run, ...]) -> Tensor:
        """First position of the document of every position of the runs, int64 [samples, positions]."""
        last = max(start + length for start, length in found)
        tokens, _ = self.inner.load(indices, 0, last)
        after = torch.where(tokens == self.separator, torch.arange(1, last + 1), 0)
        begins = torch.cat((torch.zeros_like(after[:, :1]), after[:, :-1]), 1).cummax(1).values
        return begins[:, positions(found)]


def squares(queries: tuple[Run, ...], keys: tuple[Run, ...], starts: Tensor) -> Iterator[Square]:
    """Parts of queries and keys that see each other, for one sample; `starts` [queries]. A run of queries lies within
    one run of keys or apart from it."""
    row = 0
    for first, length in queries:
        documents, counts = torch.unique_consecutive(starts[row : row + length], return_counts=True)
        for start, count in zip(documents.tolist(), counts.tolist(), strict=True):
            column = 0
            for key, number in keys:
                low, end = max(key, start), min(key + number, first + count)
                if low < min(end, first):  # what lies before the queries is seen by all of them
                    yield Square(row, count, column + low - key, min(end, first) - low, False)
                if key <= first and end == first + count:
                    yield Square(row, count, column + first - key, count, True)
                column += number
            row, first = row + count, first + count


Places = tuple[tuple[Run, ...], tuple[Run, ...]]  # runs of the queries and of the keys


def attend(
    attributes: Attributes, operands: tuple[Tensor, Tensor, Tensor, Tensor], places: Places, out: Tensor, lse: Tensor
) -> None:
    """Merges attention into `out` [batch, queries, heads * d] and `lse` [batch, heads, queries], where nothing was seen
    yet zero and minus infinity. `operands` are q, k, v and starts."""
    q, k, v, starts = operands
    queries, keys, values, target = (_heads(x, attributes) for x in (q, k, v, out))
    for sample in range(q.shape[0]):
        for square in squares(*places, starts[sample]):
            rows, columns = _slices(sample, square)
            block, block_lse = attention_block(queries[rows], keys[columns], values[columns], square.causal)
            before = lse[rows]
            total = torch.logaddexp(before, block_lse)
            part = target[rows]
            part.mul_((before - total).exp().unsqueeze(-1))
            part.addcmul_(block.to(out.dtype), (block_lse - total).exp().unsqueeze(-1))
            before.copy_(total)


def attend_backward(
    attributes: Attributes, saved: Saved, gradient: Tensor, places: Places
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v in float32 (float64), from the final `out` and `lse`."""
    q, k, v = saved["q"], saved["k"], saved["v"]
    dtype = statistics(q.dtype)
    found = tuple(torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format) for x in (q, k, v))
    queries, keys, values, out, given = (_heads(x, attributes) for x in (q, k, v, saved["out"], gradient))
    dq, dk, dv = (_heads(x, attributes) for x in found)
    for sample in range(q.shape[0]):
        for square in squares(*places, saved["starts"][sample]):
            rows, columns = _slices(sample, square)
            parts = attention_block_backward(
                given[rows], queries[rows], keys[columns], values[columns], out[rows],
                saved["lse"][rows].contiguous(), square.causal,
            )  # fmt: skip
            dq[rows].add_(parts[0])
            dk[columns].add_(parts[1])
            dv[columns].add_(parts[2])
    return found  # type: ignore[return-value]


def _slices(sample: int, square: Square) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    one, everything = slice(sample, sample + 1), slice(None)
    rows = slice(square.query, square.query + square.queries)
    return (one, everything, rows), (one, everything, slice(square.key, square.key + square.keys))


def _heads(x: Tensor, attributes: Attributes) -> Tensor:
    """[batch, length, heads * d] -> [batch, heads, length, d], without a copy."""
    return x.view(x.shape[0], x.shape[1], -1, int(attributes["head_dim"])).transpose(1, 2)
