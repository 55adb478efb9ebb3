"""Limits of time are those of a usual core; on one that is slower, or shared, they are longer by as much."""

from __future__ import annotations

import time

USUAL = 0.045  # seconds of CPU time for the additions below on a core of 3 GHz


def slowness() -> float:
    """How many times as long as a usual core this one takes at the moment, at least 1."""
    return max(1.0, min(_additions() for _ in range(3)) / USUAL)


def _additions() -> float:
    start, total = time.process_time(), 0
    for number in range(1_000_000):
        total += number
    return time.process_time() - start
