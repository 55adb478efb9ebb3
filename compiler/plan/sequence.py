"""Where the tokens of a sequence lie on the ranks of a ring, and which of them see each other.

In natural order rank r of a ring of n holds the r-th n-th of the sequence. Under a causal mask the last rank then has
nearly twice the mean work. In *zigzag* order the sequence is cut into 2n chunks and rank r holds the chunks r and
2n - 1 - r: all ranks have equal work in every step. Zigzag is a permutation: the plan's layouts speak of the permuted
sequence, and whoever needs true positions (loading, rotary and learned positions, dropout) asks `runs` for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Run = tuple[int, int]  # first position, number of positions


def runs(start: int, length: int, zigzag: int = 0, chunk: int = 0) -> tuple[Run, ...]:
    """True positions of the places `start` to `start + length` of the permuted sequence, as runs in their order.

    `zigzag` is the number of ranks of the ring (0: natural order), `chunk` the length of a chunk.
    """
    if not zigzag:
        return ((start, length),)
    found: list[Run] = []
    end = start + length
    while start < end:
        number, offset = divmod(start, chunk)
        rank, second = divmod(number, 2)
        first = (2 * zigzag - 1 - rank if second else rank) * chunk + offset
        count = min(chunk - offset, end - start)
        if found and sum(found[-1]) == first:
            found[-1] = (found[-1][0], found[-1][1] + count)
        else:
            found.append((first, count))
        start += count
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Square:
    """The queries and keys of one ring step that see each other, as first index and number on this rank; with `causal`
    query i sees the keys up to i."""

    query: int
    queries: int
    key: int
    keys: int
    causal: bool

    @property
    def pairs(self) -> float:
        """Pairs of query and key; a causal square counts half of them, as everywhere in FLOP counts."""
        return self.queries * self.keys * (0.5 if self.causal else 1.0)


def visible(attributes: Mapping[str, int | float | str | bool], length: int) -> Square | None:
    """What rank `rank` of a ring computes in step `step`, when it holds the keys of rank - step.

    `length` is the number of tokens of every rank. None: no query sees any of these keys.
    """
    step, rank = int(attributes["step"]), int(attributes["rank"])
    if step == 0 or not attributes["causal"]:
        return Square(0, length, 0, length, bool(attributes["causal"]))
    earlier = rank >= step  # the keys come from a rank before this one, not around the end of the ring
    if attributes["zigzag"]:
        half = length // 2
        return Square(0, length, 0, half, False) if earlier else Square(half, half, 0, length, False)
    return Square(0, length, 0, length, False) if earlier else None


def mean_pairs(attributes: Mapping[str, int | float | str | bool], length: int) -> float:
    """Pairs of one step as a mean over the ranks of the ring."""
    step, ring = int(attributes["step"]), int(attributes["ring"])
    whole = float(length * length)
    if not attributes["causal"]:
        return whole
    return whole / 2 if step == 0 or attributes["zigzag"] else whole * (ring - step) / ring


def most_pairs(attributes: Mapping[str, int | float | str | bool], length: int) -> float:
    """Pairs of one step on the rank that has most of them."""
    whole = float(length * length)
    return whole / 2 if attributes["causal"] and (attributes["step"] == 0 or attributes["zigzag"]) else whole
