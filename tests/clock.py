"""Limits of time are those of a fast core; on one that is slower, or shared, they are longer by as much."""

from __future__ import annotations

import time

FAST = 0.02  # seconds of CPU time for the additions below on a fast core


def slowness() -> float:
    """How many times as long as a fast core this one takes at the moment, at least 1."""
    return max(1.0, min(_additions() for _ in range(3)) / FAST)


def _additions() -> float:
    start, total = time.process_time(), 0
    for number in range(1_000_000):
        total += number
    return time.process_time() - start
