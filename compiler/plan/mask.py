"""What a causal mask, with or without a sliding window, leaves of attention: which keys a query sees.

A query at position q sees the keys q - window + 1 .. q, its own among them; without a window (0) all up to its own.
That band is cut into squares that kernels know: seen whole, or up to a diagonal.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

from titan.compiler.plan.frozen import dataclass

Run = tuple[int, int]  # first position, number of positions


@dataclass(frozen=True, slots=True)
class Square:
    """Queries and keys that see each other, as first index and number on this rank. With `causal` query i sees the keys
    up to i, with `late` those from i on; both have as many keys as queries. A square may stand for a row of `repeats`
    equal ones, each `stride` queries and keys further on, which one kernel computes."""

    query: int
    queries: int
    key: int
    keys: int
    causal: bool = False
    late: bool = False
    repeats: int = 1
    stride: int = 0

    @property
    def pairs(self) -> float:
        """Pairs of query and key; a diagonal leaves half of them, as everywhere in FLOP counts."""
        return self.repeats * self.queries * self.keys * (0.5 if self.causal or self.late else 1.0)


def sees(queries: Run, keys: Run, window: int = 0) -> bool:
    """Whether any of the queries sees any of the keys."""
    nearest = queries[0] - (keys[0] + keys[1] - 1)
    return sum(queries) > keys[0] and (not window or nearest < window)


@lru_cache(maxsize=4096)
def band_pairs(queries: Run, keys: Run, window: int = 0) -> float:
    """Pairs that see each other; every diagonal counts half of its square, so that pieces of a sequence add up to
    S^2 / 2 without a window, S W - W^2 / 2 with one: the area of the band 0 <= q - k <= window."""
    found = _below(queries, keys, 0)
    return found - _below(queries, keys, window) if window else found


def _below(queries: Run, keys: Run, distance: int) -> float:
    """Area of the pairs with q - k >= distance."""
    ends = [(q, k) for q in (queries[0], sum(queries)) for k in (keys[0], sum(keys))]
    corners = [max(q - k - distance, 0) ** 2 / 2 for q, k in ends]
    return corners[2] - corners[3] - corners[0] + corners[1]


def squares(queries: Run, keys: Run, window: int = 0) -> Iterator[Square]:
    """The band between a run of queries and a run of keys, cut into squares; indices count from the runs' starts.

    The first key that a query sees stays the run's first until the window has left it, the last one is the query's own
    until the run ends. Between such places queries see keys of one form: a square, with a causal one where the end
    moves and a late one where the beginning does. Where both move, `window` queries are taken at a time: no square is
    left between the two diagonals.
    """
    begin, stop = keys[0], sum(keys)
    reach = window - 1 if window else max(sum(queries), stop)
    first, end = max(queries[0], begin), min(sum(queries), stop + reach)
    cuts = sorted({first, end} | {cut for cut in (begin + reach + 1, stop) if first < cut < end})
    for start, last in pairwise(cuts) if first < end and begin < stop else ():
        beginning, ending = start > begin + reach, start < stop  # which ends of the seen keys move with the query
        number = (last - start) // window if beginning and ending else 0
        if number:
            stride = window if number > 1 else 0
            yield Square(start - queries[0], window, start - begin, window, causal=True, repeats=number, stride=stride)
            if reach:
                yield Square(
                    start - queries[0], reach, start - reach - begin, reach, late=True, repeats=number, stride=stride
                )
        a = start + number * window
        low, high = last - 1 - reach if beginning else begin, a if ending else stop
        if a < last and low < high:
            yield Square(a - queries[0], last - a, low - begin, high - low)
        if a < last and ending:
            yield Square(a - queries[0], last - a, a - begin, last - a, causal=True)
        if a + 1 < last and beginning:
            yield Square(a - queries[0], last - a - 1, a - reach - begin, last - a - 1, late=True)
