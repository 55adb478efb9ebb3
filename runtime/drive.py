"""The driver of one rank in its own process: polls the handle of each wait, and an abort flag.

Polling costs no thread hand-over: first the core is offered to others between polls; when a wait has lasted for a
while, the thread sleeps until the operation ends and looks at the flag now and then. Where ranks share cores it sleeps
soon; on a core of its own it does not, since a core that has nothing to do may take milliseconds to wake.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from typing import Protocol

from titan.grammar.diagnostics import Diagnostic, TitanError
from titan.runtime.interpreter import StepReport
from titan.runtime.transport.base import Handle

SHARING = 2e-4  # seconds of a wait in which only the core is yielded, where ranks share cores
ALONE = 1e-3  # the same where each has its own: longer than ranks in step wait, shorter than a pipeline's bubble
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
    ranks: int

    @property
    def position(self) -> int: ...

    def describe(self, position: int) -> str: ...

    def run(self, step: int) -> Generator[Handle, None, StepReport]: ...


def drive(executable: Program, step: int, flag: AbortFlag | None = None, local: int = 0) -> StepReport:
    """Runs one step to its end. `local` of the ranks are on this machine, all where it is not given. Raises Aborted
    when the flag is raised during a wait or a peer's connection is lost."""
    run, spin = executable.run(step), patience(local or executable.ranks)
    try:
        while True:
            if not settled(next(run), flag, spin):
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


def patience(ranks: int) -> float:
    """Seconds for which a wait polls before it sleeps, where so many ranks are at work on this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return ALONE if ranks <= cores else SHARING


def settled(handle: Handle, flag: AbortFlag | None, spin: float = SHARING) -> bool:
    """True when done, False when the flag came first; polls for `spin` seconds before it sleeps."""
    end = time.perf_counter() + spin
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
