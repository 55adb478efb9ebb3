"""Whole numbers that divide one another: divisors, nearest multiples, even splits."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=256)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors in rising order."""
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*low, *(number // d for d in low)}))


def around(legal_values: tuple[int, ...], wish: int) -> tuple[str, ...]:
    """The nearest legal values below and above a wish."""
    below, above = [v for v in legal_values if v < wish], [v for v in legal_values if v > wish]
    return tuple(str(v) for v in below[-1:] + above[:1])


def even_stages(layers: int, pipeline: int) -> tuple[int, ...]:
    """Layers per stage, equal but for one, the longer stages first."""
    whole, rest = divmod(layers, pipeline)
    return tuple(whole + (stage < rest) for stage in range(pipeline))


def factorisation(degrees: dict[str, int]) -> str:
    """`pipeline 2 x data 4 x ...`"""
    return " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())


def multiples(number: int, unit: int) -> tuple[int, ...]:
    """The nearest positive multiples of `unit` below and above."""
    below = number // unit * unit
    return tuple(m for m in (below, below + unit) if m > 0)
