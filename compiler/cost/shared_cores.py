"""Ranks that share processor cores: time passes more slowly while more of them are at work than there are cores.

The scheduler gives every runnable process an equal share, so with a load of `n` on `c < n` cores all work that is under
way takes `n / c` times as long, and what waits for it waits as much longer. Between two events that is one factor for
everything; so a timeline that was simulated as if every rank had a core of its own becomes the real one by stretching
each moment by `max(1, load / cores)`.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import field

from titan.compiler.plan.frozen import dataclass


@dataclass(slots=True)
class Loads:
    """Processor load over simulated time: each interval [start, stop) in ns adds some cores' worth."""

    cores: float
    changes: dict[int, float] = field(default_factory=dict)

    def add(self, start: int, stop: int, load: float) -> None:
        if stop > start:
            self.changes[start] = self.changes.get(start, 0.0) + load
            self.changes[stop] = self.changes.get(stop, 0.0) - load

    def clock(self) -> Clock:
        """From simulated to real time."""
        times, real, slopes = [0], [0.0], [1.0]
        load = 0.0
        for time, change in sorted(self.changes.items()):
            real.append(real[-1] + (time - times[-1]) * slopes[-1])
            times.append(time)
            load += change
            slopes.append(max(1.0, load / self.cores))
        return Clock(tuple(times), tuple(real), tuple(slopes))


@dataclass(frozen=True, slots=True)
class Clock:
    """A rising broken line through (simulated, real) ns."""

    times: tuple[int, ...]
    real: tuple[float, ...]
    slopes: tuple[float, ...]

    def __call__(self, time: int) -> int:
        k = bisect_right(self.times, time) - 1
        return round(self.real[k] + (time - self.times[k]) * self.slopes[k])
