"""Steps that do not wait for the norm: taken at once, checked while the next runs, taken back where they were wrong.

The plan's orders `body`, `check`, `update` and `undo` say what is done; here is only when. All ranks see the same norm,
so all take a step back together. To take one back costs the next body and the step again, so a step is tried ahead only
after one whose norm was well below what clips: a run that clips now and then is an exact run while it does.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace

from titan.runtime.interpreter import Executable, StepReport
from titan.runtime.optimizer import Training
from titan.runtime.transport.base import Handle

MARGIN = 1.5  # by which norms of one step and the next may differ without surprise
ORDERS = ("train", "body", "check", "update", "undo")
Run = Generator[Handle, None, StepReport]


class Settled:
    """What is left of the last step: driven before anyone looks at the state."""

    def __init__(self, ahead: Ahead) -> None:
        self.rank, self.ranks, self._ahead = ahead.rank, ahead.ranks, ahead

    @property
    def position(self) -> int:
        return self._ahead.position

    def describe(self, position: int) -> str:
        return self._ahead.describe(position)

    def run(self, step: int) -> Run:
        return self._ahead.settle(step)


class Ahead:
    """One rank's program for training, run like an `Executable`; `take` gives the reports of the steps that are
    certain, `settle` makes the last one certain."""

    order = "train"

    def __init__(self, make: Callable[[str], Executable], training: Training) -> None:
        self.exact, self.body, self.check, self.update, self.undo = map(make, ORDERS)
        self.rank, self.ranks = self.exact.rank, self.exact.ranks
        self._current, self._training = self.exact, training
        self._sure = False  # whether the last norm lets the next one be expected not to clip
        self._open: tuple[StepReport, Run, Handle | None, StepReport | None] | None = None
        self._certain: list[StepReport] = []

    @property
    def position(self) -> int:
        return self._current.position

    def describe(self, position: int) -> str:
        """The text of an instruction of the order that runs."""
        return self._current.describe(position)

    def run(self, step: int) -> Run:
        """One step; the one before becomes certain. The report's loss and norm are known when the step is."""
        if not self._sure:
            yield from self._looked()
            return (yield from self._exactly(step))
        report = yield from self._turn(self.body, step)
        if not (yield from self._looked()):
            return (yield from self._exactly(step))  # what the body summed up was cleared with the step before
        check, (handle, found) = yield from self._begun(step)
        yield from self._turn(self.update, step)
        self._open = (report, check, handle, found)
        return report

    def _begun(self, step: int) -> Generator[Handle, None, tuple[Run, tuple[Handle | None, StepReport | None]]]:
        """The check up to the first wait of its second half, which is for what other stages have still to give; and
        what it waits for, or its report where it waits for nothing."""
        self._current = self.check
        check = self.check.run(step)
        try:
            while (handle := next(check)) is not None and self.check.position < self.check.begun:
                yield handle
        except StopIteration as end:
            return check, (None, end.value)
        return check, (handle, None)

    def settle(self, step: int = 0) -> Run:
        """Waits for the last check and does what it asks for."""
        yield from self._looked()
        return self._certain[-1] if self._certain else StepReport(step, None, None, 0, 0, False)

    def take(self) -> list[StepReport]:
        """Reports of the steps that have become certain since the last call, in order."""
        found, self._certain = self._certain, []
        return found

    def _turn(self, executable: Executable, step: int) -> Run:
        self._current = executable
        return (yield from executable.run(step))

    def _exactly(self, step: int) -> Run:
        report = yield from self._turn(self.exact, step)
        self._sure = self._passes(report, MARGIN)
        self._certain.append(report)
        return report

    def _passes(self, report: StepReport, margin: float = 1.0) -> bool:
        """Whether the norm, and any up to `margin` times as large, neither clips nor is infinite."""
        norm = report.grad_norm
        return norm is not None and norm < float("inf") and self._training.clip_factor(margin * norm) == 1.0

    def _looked(self) -> Generator[Handle, None, bool]:
        """Ends the open check; False when its step was taken back and done again."""
        if self._open is None:
            return True
        report, check, handle, found = self._open
        self._open, self._current = None, self.check
        while found is None:
            assert handle is not None
            yield handle
            try:
                handle = next(check)
            except StopIteration as end:
                found = end.value
        if self._passes(found):
            self._sure = self._passes(found, MARGIN)
            self._certain.append(replace(report, loss=found.loss, grad_norm=found.grad_norm))
            return True
        yield from self._turn(self.undo, report.step)
        yield from self._exactly(report.step)
        return False
