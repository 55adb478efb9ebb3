"""Where the tokens of a sequence lie on the ranks of a ring, and which of them see each other.

In natural order rank r of a ring of n holds the r-th n-th of the sequence. Under a causal mask the last rank then has
nearly twice the mean work. In *zigzag* order the sequence is cut into 2n chunks and rank r holds the chunks r and
2n - 1 - r: all ranks have equal work in every step. Zigzag is a permutation: the plan's layouts speak of the permuted
sequence, and whoever needs true positions (loading, rotary and learned positions, dropout) asks `runs` for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from titan.compiler.plan.mask import Run, Square, band_pairs, squares

Given = Mapping[str, int | float | str | bool]


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


def held(rank: int, ring: int, zigzag: bool, length: int) -> tuple[Run, ...]:
    """True positions of the `length` tokens of a rank of a ring, as runs in their order."""
    return runs(rank * length, length, ring if zigzag else 0, length // 2)


def places(attributes: Given, length: int) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """Positions of a rank's own queries, and of the keys that visit it in a step of its ring."""
    rank, ring, step = (int(attributes[name]) for name in ("rank", "ring", "step"))
    zigzag = bool(attributes["zigzag"])
    return held(rank, ring, zigzag, length), held((rank - step) % ring, ring, zigzag, length)


def visible(attributes: Given, length: int) -> tuple[Square, ...]:
    """What rank `rank` of a ring computes in step `step`, when it holds the keys of rank - step; nothing where no query
    sees any of these keys. `length` is the number of tokens of every rank."""
    step, rank, causal = int(attributes["step"]), int(attributes["rank"]), bool(attributes["causal"])
    window = int(attributes.get("window", 0))
    if window:
        return between(*places(attributes, length), window)
    if step == 0 or not causal:
        return (Square(0, length, 0, length, causal),)
    earlier = rank >= step  # the keys come from a rank before this one, not around the end of the ring
    if attributes["zigzag"]:
        half = length // 2
        return (Square(0, length, 0, half) if earlier else Square(half, half, 0, length),)
    return (Square(0, length, 0, length),) if earlier else ()


def between(queries: tuple[Run, ...], keys: tuple[Run, ...], window: int = 0) -> tuple[Square, ...]:
    """The squares of several runs of queries and keys, whose indices count on from run to run."""
    found: list[Square] = []
    row = 0
    for query in queries:
        column = 0
        for key in keys:
            found += [replace(s, query=row + s.query, key=column + s.key) for s in squares(query, key, window)]
            column += key[1]
        row += query[1]
    return tuple(found)


@lru_cache(maxsize=4096)
def needed_steps(ring: int, zigzag: bool, length: int, window: int = 0) -> tuple[int, ...]:
    """Steps of a ring in which any rank sees any of the visiting keys: with a window those whose blocks are near.

    In natural order the keys of step j lie j blocks before the queries. In zigzag order those of one chunk do, and
    those of the other n - j chunks, so the first and the last steps are needed.
    """
    block = length // 2 if zigzag else length
    apart = (min(j, ring - j) if zigzag else j for j in range(ring))
    return tuple(j for j, n in enumerate(apart) if not window or n == 0 or (n - 1) * block + 1 < window)


def seen_pairs(attributes: Given, length: int) -> float:
    """Pairs of a whole sequence that the mask leaves."""
    if not attributes.get("causal", True):
        return float(length * length)
    return band_pairs((0, length), (0, length), int(attributes.get("window", 0)))


def mean_pairs(attributes: Given, length: int) -> float:
    """Pairs of one step as a mean over the ranks of the ring."""
    step, ring = int(attributes["step"]), int(attributes["ring"])
    whole = float(length * length)
    if attributes.get("window"):
        return sum(_windowed(attributes, length)) / ring
    if not attributes["causal"]:
        return whole
    return whole / 2 if step == 0 or attributes["zigzag"] else whole * (ring - step) / ring


def most_pairs(attributes: Given, length: int) -> float:
    """Pairs of one step on the rank that has most of them."""
    whole = float(length * length)
    if attributes.get("window"):
        return max(_windowed(attributes, length))
    return whole / 2 if attributes["causal"] and (attributes["step"] == 0 or attributes["zigzag"]) else whole


def _windowed(attributes: Given, length: int) -> tuple[float, ...]:
    step, ring, window = (int(attributes[name]) for name in ("step", "ring", "window"))
    return _pairs(step, ring, bool(attributes["zigzag"]), window, length)


@lru_cache(maxsize=4096)
def _pairs(step: int, ring: int, zigzag: bool, window: int, length: int) -> tuple[float, ...]:
    """Pairs of one step on every rank of a ring with a window."""
    blocks = [held(rank, ring, zigzag, length) for rank in range(ring)]
    return tuple(
        sum(band_pairs(query, key, window) for query in blocks[rank] for key in blocks[(rank - step) % ring])
        for rank in range(ring)
    )
