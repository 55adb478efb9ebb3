"""How much is measured in the time that there is: a slow machine is timed fewer times, and of the probes on it the
largest are left out."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable

from titan.compiler.profile.probes import Probe

SECONDS = 105.0  # in which everything is measured
OPERATORS = 0.7  # share of them after which operators have been
WARM_UP = 1  # steps of a probe before those that are timed, as a whole and operator by operator
LEAST = 0.01  # share of repetitions, however long they take

Clock = Callable[[], float]


class Pace:
    """Of probes that are to end at a moment of the clock: how many of their steps are timed. What was done says what
    the others will take, by precision: not every machine has products of all."""

    def __init__(self, probes: Iterable[Probe], end: float, clock: Clock = time.perf_counter) -> None:
        self._left, self._end, self._clock = list(probes), end, clock
        self._done: dict[str, tuple[float, float]] = {}  # seconds and work

    def steps(self, probe: Probe) -> int:
        """Steps that are timed of the next probe; 0: there is no time for it. The quickest have their least steps
        before a slower one has any, and all of theirs before it has more."""
        room, kept = self._end - self._clock(), list[Probe]()
        for other in sorted(self._left, key=lambda p: self._seconds(p, p.least)):
            if self._seconds(other, other.least) > room:
                break
            room -= self._seconds(other, other.least)
            kept.append(other)
        for other in kept:
            beyond = [self._seconds(other, n) - self._seconds(other, other.least) for n in _steps(other)]
            number = bisect_right(beyond, room) - 1
            if other is probe:
                return other.least + number
            room -= beyond[number]
        return 0

    def done(self, probe: Probe, steps: int, seconds: float) -> None:
        """It took so many seconds; none where it was left out."""
        self._left.remove(probe)
        if steps:
            before, work = self._done.get(probe.precision, (0.0, 0.0))
            self._done[probe.precision] = before + seconds, work + _repeated(probe, steps)

    def _seconds(self, probe: Probe, steps: int) -> float:
        known = [self._done[probe.precision]] if probe.precision in self._done else [*self._done.values()]
        return sum(seconds for seconds, _ in known) / max(sum(work for _, work in known), 1.0) * _repeated(probe, steps)


def _steps(probe: Probe) -> range:
    """Numbers of steps that it may have."""
    return range(probe.least, probe.steps + 1)


def _repeated(probe: Probe, steps: int) -> float:
    return probe.work * (WARM_UP + 2 * steps)


class Share:
    """Of items that take about as long as each other and are to end at a moment of the clock: what share of its
    repetitions the next one has time for."""

    def __init__(self, items: int, end: float, clock: Clock = time.perf_counter) -> None:
        self._items, self._end, self._clock = items, end, clock
        self._share = 1.0
        self._begun: float | None = None

    def next(self) -> float:
        """Above 0, at most 1."""
        now = self._clock()
        if self._begun is not None:
            whole = max(now - self._begun, 1e-9) / self._share
            self._share = min(max((self._end - now) / self._items / whole, LEAST), 1.0)
        self._items, self._begun = max(self._items - 1, 1), now
        return self._share
