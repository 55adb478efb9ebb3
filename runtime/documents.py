"""Several documents in one sequence: where each begins, and attention that does not cross from one to the next.

A document ends with the separator token. What a token needs to know is the place at which its document starts: its
query sees the keys from there up to itself. The keys need to know nothing, so rings carry nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace

import torch
from titan.compiler.plan import mask
from titan.compiler.plan.mask import Run, Square
from titan.runtime.attention_squares import Seen
from titan.runtime.data import IGNORED, Around
from titan.runtime.place import Attributes
from titan.runtime.positions import positions
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Places = tuple[tuple[Run, ...], tuple[Run, ...]]  # runs of the queries and of the keys


@dataclass(frozen=True)
class Documents(Around):
    """A source whose documents end with `separator`: what follows a separator is no label of it."""

    separator: int

    def load(self, indices: Sequence[int], start: int, stop: int) -> tuple[Tensor, Tensor]:
        tokens, labels = self.inner.load(indices, start, stop)
        return tokens, labels.masked_fill(tokens == self.separator, IGNORED)

    def starts(self, indices: Sequence[int], found: tuple[Run, ...]) -> Tensor:
        """First position of the document of every position of the runs, int64 [samples, positions]."""
        last = max(start + length for start, length in found)
        tokens, _ = self.inner.load(indices, 0, last)
        after = torch.where(tokens == self.separator, torch.arange(1, last + 1), 0)
        begins = torch.cat((torch.zeros_like(after[:, :1]), after[:, :-1]), 1).cummax(1).values
        return begins[:, positions(found)]


def squares(queries: tuple[Run, ...], keys: tuple[Run, ...], starts: Tensor, window: int = 0) -> Iterator[Square]:
    """Parts of queries and keys that see each other, for one sample; `starts` [queries]."""
    row = 0
    for first, length in queries:
        documents, counts = torch.unique_consecutive(starts[row : row + length], return_counts=True)
        for start, count in zip(documents.tolist(), counts.tolist(), strict=True):
            column = 0
            for key, number in keys:
                low = max(key, start)
                for square in mask.squares((first, count), (low, key + number - low), window):
                    yield replace(square, query=row + square.query, key=column + low - key + square.key)
                column += number
            row, first = row + count, first + count


def seen(attributes: Attributes, places: Places, starts: Tensor) -> Seen:
    """The squares of every sample; `starts` [samples, queries].

    All layers of a micro-batch ask for the same: found once, a device is waited for once.
    """
    key = (places, int(attributes.get("window", 0)))
    found = _known.setdefault(starts, {})
    if key not in found:
        found[key] = tuple(
            (slice(sample, sample + 1), square)
            for sample, row in enumerate(starts.cpu())
            for square in squares(*places, row, key[1])
        )
    return found[key]


# by the tensor of starts, as long as it lives; then by places and window
_known: MutableMapping[Tensor, dict[tuple[Places, int], tuple[tuple[slice, Square], ...]]]
_known = WeakTensorKeyDictionary()
