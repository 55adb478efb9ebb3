"""Closed form of gathers of whole parameters, once a step: seconds that nothing hides."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titan.compiler.strategy import Strategy


def gather_seconds(s: Strategy, gather: float, shown: float, buckets: float) -> float:
    """Of the seconds in which a stage gathers all of its parameters: with ZeRO-1 and 2, behind the updates, all; with
    ZeRO-3, from the beginning of a step on, what is `shown` beside the first forward that it comes under, and the first
    of the `buckets`. Later chunks come while the first micro-batch is on its way to them."""
    if s.zero < 3:
        return gather if s.zero else 0.0
    return max(shown, gather / max(buckets, 1.0)) / s.chunks if s.gather == "once" else 0.0
