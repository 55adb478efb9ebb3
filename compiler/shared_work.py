"""Work shared with a second process that begins at once, while this one may go on with something else."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

T = TypeVar("T")
MOST = 256  # jobs: each is a byte in a pipe


def second_core() -> bool:
    """Whether a second process is fast and safe: a core for it, and no threads that a fork would leave behind."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return cores > 1 and "torch" not in sys.modules and threading.active_count() == 1


class SharedWork(Generic[T]):
    """Jobs by name, done by this process and by a forked one, which has all that they read. The fork begins with the
    first job, whose result says whether there are others; then whoever is free takes the next, so that nobody waits
    while there is work. What a killed helper leaves undone is done here."""

    def __init__(self, jobs: Mapping[str, Callable[[], T]], go_on: Callable[[T], bool]) -> None:
        import multiprocessing

        if len(jobs) > MOST:
            raise ValueError(f"{len(jobs)} jobs, but at most {MOST}")
        self._jobs, self._names, self._go_on = jobs, tuple(jobs), go_on
        self._found: dict[str, T] = {}
        self._queue, tokens = os.pipe()
        context = multiprocessing.get_context("fork")
        self._results, there = context.Pipe(duplex=False)
        self._helper = context.Process(target=self._help, args=(tokens, there), daemon=True)
        self._helper.start()
        os.close(tokens)
        there.close()

    def _help(self, tokens: int, results: Connection) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to answer: it ends this process too
        first = self._names[0]
        self._found[first] = self._jobs[first]()
        if self._go_on(self._found[first]):
            os.write(tokens, bytes(range(1, len(self._names))))
        os.close(tokens)
        self._take()
        results.send(self._found)

    def _take(self) -> None:
        """Does jobs until none is left."""
        while token := os.read(self._queue, 1):
            name = self._names[token[0]]
            self._found[name] = self._jobs[name]()

    def finish(self) -> dict[str, T]:
        """Results of all jobs in their order, or of the first alone where nothing follows from it."""
        self._take()
        with suppress(EOFError):  # it was killed
            self._found |= self._results.recv()
        self._close()
        return in_order(self._jobs, self._go_on, self._found)

    def stop(self) -> None:
        """Leaves the jobs undone."""
        self._helper.terminate()
        self._close()

    def _close(self) -> None:
        self._helper.join()
        self._results.close()
        os.close(self._queue)


def in_order(
    jobs: Mapping[str, Callable[[], T]], go_on: Callable[[T], bool], done: Mapping[str, T] | None = None
) -> dict[str, T]:
    """The jobs that are not done, by this process alone; results of all, or of the first where nothing follows."""
    found: dict[str, T] = {}
    for name, job in jobs.items():
        found[name] = done[name] if done and name in done else job()
        if len(found) == 1 and not go_on(found[name]):
            break
    return found
