"""Medians of per-round ratios with an interval that needs no assumption about their distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of the rounds and its 95% interval by order statistics."""

    value: float
    low: float
    high: float

    def shown(self) -> dict[str, float]:
        return {"median": self.value, "low": self.low, "high": self.high}

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio(rounds: Sequence[float]) -> Ratio:
    """The interval reaches from the k-th smallest to the k-th largest round such that the median lies between them with
    at least 95%; with fewer than six rounds it is all of them."""
    ordered, n = sorted(rounds), len(rounds)
    k = 0
    while k + 1 < n / 2 and 2 * sum(comb(n, i) for i in range(k + 1)) / 2**n <= 0.05:
        k += 1
    k = max(k - 1, 0)
    return Ratio(median(ordered), ordered[k], ordered[n - 1 - k])
