"""The driver of one rank in its own process: polls the handle of each wait, and an abort flag.

Polling costs no thread hand-over: first the core is offered to others between polls; when a wait has lasted a
millisecond, the thread sleeps until the operation ends and looks at the flag now and then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from typing import Protocol

from titan.grammar.diagnostics import Diagnostic, TitanError
from titan.runtime.interpreter import StepReport
from titan.runtime.transport.base import Handle

SPIN = 2e-4  # seconds of a wait in which only the core is yielded
_SLEEP = 2e-2  # seconds between looks at the flag while asleep
_POLLS = 16  # between looks at the clock and the flag


class AbortFlag(Protocol):
    """Says that the run is over: a peer died, or the launcher asks to stop."""

    def aborted(self) -> bool: ...


class Aborted(TitanError):
    """The run ended under this rank while it waited; `position` is the instruction it stood at."""

    def __init__(self, rank: int, position: int, text: str, reason: str) -> None:
        self.rank, self.position = rank, position
        message = f"rank {rank} stopped at instruction {position} `{' '.join(text.split())}`: {reason}"
        super().__init__(Diagnostic("T614", message), exit_code=1)


class Program(Protocol):
    """What can be driven: an executable, or several that take turns."""

    rank: int

    @property
    def position(self) -> int: ...

    def describe(self, position: int) -> str: ...

    def run(self, step: int) -> Generator[Handle, None, StepReport]: ...


def drive(executable: Program, step: int, flag: AbortFlag | None = None) -> StepReport:
    """Runs one step to its end. Raises Aborted when the flag is raised during a wait or a peer's connection is lost."""
    run = executable.run(step)
    try:
        while True:
            if not settled(next(run), flag):
                raise _aborted(executable, "the run was aborted")
    except StopIteration as end:
        report: StepReport = end.value
        return report
    except RuntimeError as error:
        if "gloo" in str(error).lower() or "nccl" in str(error).lower():
            raise _aborted(executable, str(error).strip().splitlines()[0]) from error
        raise
    finally:
        _close(run)


def settled(handle: Handle, flag: AbortFlag | None) -> bool:
    """True when done, False when the flag came first."""
    end = time.perf_counter() + SPIN
    while True:
        if poll(handle):
            return True
        if flag is not None and flag.aborted():
            return False
        if time.perf_counter() > end:
            handle.settle(_SLEEP)


def poll(handle: Handle) -> bool:
    """Looks a few times whether an operation is done, and offers the core to others in between."""
    for _ in range(_POLLS):
        if handle.done():
            return True
        os.sched_yield()
    return False


def _aborted(executable: Program, reason: str) -> Aborted:
    position = executable.position
    return Aborted(executable.rank, position, executable.describe(position), reason)


def _close(run: Generator[Handle, None, StepReport]) -> None:
    run.close()
