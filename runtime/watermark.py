"""The watermark: which recompute tier each frame gets, by the memory that is there while the program runs.

    admission   before a layer's forward: this frame and those to come go down as far as it takes to keep the known
                future below the high mark
    demotion    a stored frame goes down, the one needed last first: when that does not suffice, and when
                an allocation fails, after which the instruction is run again
    promotion   only between steps, after `QUIET` steps in which the better tiers would have done

Marks are shares of what a step may take: the limit less what is held between steps. A rank decides for itself, for what
depends on tiers involves no other rank; every change is recorded, and a record can be followed instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from titan.compiler.plan.segment import TIERS
from titan.runtime.forecast import Forecast
from titan.runtime.reading import Reading

HIGH, LOW = 0.90, 0.75
QUIET = 8

Drop = Callable[[str, str, tuple[str, ...]], None]  # frame, its new tier, registers that end
Record = Callable[["Decision"], None]


@dataclass(frozen=True, slots=True)
class Decision:
    """A frame changes its tier, for this step and those to come; `used` bytes of `limit` are in use. `reason`: step (it
    begins with other tiers), admission, pressure (its own tier did not suffice for an admission) or failure (of an
    allocation). Every frame begins with the first tier."""

    step: int
    position: int
    frame: str
    tier: str
    reason: str
    used: int
    limit: int


def read_decisions(path: Path) -> tuple[Decision, ...]:
    """The decisions of one rank as `write` wrote them, one JSON object per line."""
    return tuple(Decision(**json.loads(line)) for line in path.read_text().splitlines() if line.strip())


def decision_text(decision: Decision) -> str:
    return json.dumps(asdict(decision))


@dataclass
class Watermark:
    """One rank's state machine over one program.

    `begin` are the tiers that the plan begins with, for when not all can be the first. `drop` ends registers of a frame
    and `record` receives every change of a tier.
    """

    forecast: Forecast
    reading: Reading
    begin: dict[str, str]
    drop: Drop
    record: Record | None = None
    expected: dict[str, str] = field(default_factory=dict)  # what every frame gets unless memory is short
    step: int = 0
    limit: int = -1
    held: int = 0  # bytes between steps
    others: int = 0  # most bytes in the step that are neither held nor registers
    most: int = 0  # most bytes in the step
    quiet: int = 0
    admitted: set[str] = field(default_factory=set)
    retried: tuple[int, int] = (-1, -1)  # step and instruction of the last failure

    def __post_init__(self) -> None:
        self.expected = dict.fromkeys(self.forecast.frames, TIERS[0])

    def mark(self, share: float) -> float:
        return self.held + share * (self.limit - self.held)

    # -- between steps ------------------------------------------------------------------------------------------------

    def start(self, step: int) -> None:
        self.step, self.others, self.most = step, 0, 0
        self.admitted.clear()
        limit = self.reading.limit()
        if limit != self.limit:
            self.limit, self.held, self.quiet = limit, self.reading.used(0), QUIET
        if self.quiet >= QUIET:
            self.quiet = 0
            self._expect(self._best())
        self.forecast.begin(self.expected)

    def _best(self) -> dict[str, str]:
        """No recompute where that stays below the high mark, else what the plan begins with."""
        first = dict.fromkeys(self.forecast.frames, TIERS[0])
        fits = self.held + int(self.forecast.of(first).max()) <= self.mark(HIGH)
        return first if fits else self.begin

    def _expect(self, tiers: dict[str, str]) -> None:
        used = self.reading.used(0)
        for frame, tier in tiers.items():
            if self.expected[frame] != tier:
                self.expected[frame] = tier
                self._note(frame, -1, "step", used)

    def finish(self) -> None:
        """A step is quiet when it stayed below the low mark, or the better tiers would have kept below the high one."""
        best = self._best()
        if self.expected == best:
            self.quiet = 0
            return
        better = self.held + self.others + int(self.forecast.of(best).max())
        self.quiet = self.quiet + 1 if self.most <= self.mark(LOW) or better <= self.mark(HIGH) else 0

    # -- within a step ------------------------------------------------------------------------------------------------

    def admit(self, frame: str, position: int) -> str:
        """The tier of a frame whose forward comes next."""
        self.admitted.add(frame)
        live = self.forecast.live(position)
        used = self.reading.used(live)
        self.others = max(self.others, used - live - self.held)
        if not self._fits(used - live, position):
            self._choose(position, used, used - live)
        self.most = max(self.most, used - live + self.forecast.peak(position))
        return self.forecast.tiers[frame]

    def _fits(self, other: int, position: int) -> bool:
        return other + self.forecast.peak(position) <= self.mark(HIGH)

    def _choose(self, position: int, used: int, other: int) -> None:
        """Tiers of this frame and those to come: where the future is highest, the frame in the first tier that is
        needed last goes down, until all is below the mark. With less memory the same way is only followed further."""
        frames, tiers = self.forecast.frames, self.forecast.tiers
        coming = [f for f, found in frames.items() if found.chosen >= position]
        coming.sort(key=lambda f: frames[f].needed, reverse=True)
        while not self._fits(other, position):
            highest = self.forecast.highest(position)
            lower = {f: tier for f in coming if (tier := self.forecast.lower(f, highest)) != tiers[f]}
            if not lower:
                break
            frame = min(lower, key=lambda f: TIERS.index(tiers[f]))
            self.forecast.set(frame, lower[frame], position)
            self._settle(frame, position, "admission", used)
        changes = iter(()) if self._fits(other, position) else self._demote(position, "pressure", used)
        for _ in changes:
            if self._fits(other, position):
                break

    def relieve(self, position: int) -> bool:
        """An allocation failed: frames go down until the future is below the high mark again, one at least. Where none
        can, what is free but held is given back, once. False: there is nothing more to try."""
        live = self.forecast.live(position)
        used = self.reading.used(live)
        done = False
        for _ in self._demote(position, "failure", used):
            done = True
            if self._fits(used - live, position):
                break
        self.reading.release()
        again, self.retried = (self.step, position) == self.retried, (self.step, position)
        return done or not again

    def _demote(self, position: int, reason: str, used: int) -> Iterator[str]:
        """Takes stored frames down tier by tier, the one needed last first."""
        frames = self.forecast.frames
        stored = [f for f in self.admitted if frames[f].needed >= position]
        for frame in sorted(stored, key=lambda f: frames[f].needed, reverse=True):
            for tier in _from(self.forecast.tiers[frame])[1:]:
                names = self.forecast.dropped(frame, tier, position)
                self.forecast.set(frame, tier, position)
                self.drop(frame, tier, names)
                self._settle(frame, position, reason, used)
                yield frame

    def _settle(self, frame: str, position: int, reason: str, used: int) -> None:
        """What a frame was demoted to is what it gets in the steps to come."""
        if self.forecast.tiers[frame] != self.expected[frame]:
            self.expected[frame] = self.forecast.tiers[frame]
            self._note(frame, position, reason, used)

    def _note(self, frame: str, position: int, reason: str, used: int) -> None:
        if self.record is not None:
            self.record(Decision(self.step, position, frame, self.expected[frame], reason, used, self.limit))


class Replay(Watermark):
    """Follows the record of another run: every frame gets the tier that it had there in the end of the step."""

    def follow(self, decisions: Iterable[Decision]) -> Replay:
        self.given: dict[str, dict[int, str]] = {}
        for decision in decisions:
            self.given.setdefault(decision.frame, {})[decision.step] = decision.tier
        return self

    def start(self, step: int) -> None:
        self.step, self.limit = step, self.reading.limit()
        self.admitted.clear()
        for frame, tiers in self.given.items():
            known = [when for when in tiers if when <= step]
            if known:
                self._expect({frame: tiers[max(known)]})
        self.forecast.begin(self.expected)

    def finish(self) -> None:
        """Nothing is decided here."""

    def admit(self, frame: str, position: int) -> str:
        self.admitted.add(frame)
        return self.expected[frame]


def _from(tier: str) -> tuple[str, ...]:
    return TIERS[TIERS.index(tier) :]
