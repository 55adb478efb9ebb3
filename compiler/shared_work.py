"""Work shared with a second process that begins at once, while this one may go on with something else."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkProcess

T = TypeVar("T")
MOST = 256  # jobs: each is a byte in a pipe


def second_core() -> bool:
    """Whether a second process is fast and safe: a core for it, and no threads that a fork would leave behind."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return cores > 1 and "torch" not in sys.modules and threading.active_count() == 1


class SharedWork(Generic[T]):
    """Jobs by name, done by this process and, where that `pays`, by a forked one, which has all that they read. Whoever
    is free takes the next one, so that nobody waits while there is work. The fork begins at once, or when told if it is
    to be `later`; where `go_on` says whether there are others by the result of the first, with that one. What a helper
    leaves undone, because it was killed or the job failed, is done here, and so are jobs that are this process's `own`,
    for what it has worked out by then. A context; leaving it ends what is under way.
    """

    def __init__(
        self,
        jobs: Mapping[str, Callable[[], T]],
        go_on: Callable[[T], bool] | None = None,
        pays: bool = True,
        later: bool = False,
        own: Collection[str] = (),
    ) -> None:
        self._jobs, self._names, self._go_on = jobs, tuple(jobs), go_on
        self._shared = bytes(n for n, name in enumerate(self._names[:MOST]) if name not in own)
        self._found: dict[str, T] = {}
        self._helper: ForkProcess | None = None
        self._begun = not pays or len(jobs) > MOST
        if not later:
            self.begin()

    def begin(self) -> None:
        """Tells the helper to begin, the first time."""
        if not self._begun and second_core():
            self._fork()
        self._begun = True

    def _fork(self) -> None:
        import multiprocessing

        context = multiprocessing.get_context("fork")
        self._queue, tokens = os.pipe()
        self._results, there = context.Pipe(duplex=False)
        if self._go_on is None:
            os.write(tokens, self._shared)
        self._helper = context.Process(target=self._help, args=(tokens, there), daemon=True)
        self._helper.start()
        os.close(tokens)
        there.close()

    def _help(self, tokens: int, results: Connection) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to answer: it ends this process too
        with suppress(Exception):  # it is raised where the job is done again
            if self._go_on is not None:
                first = self._names[0]
                self._found[first] = self._jobs[first]()
                if self._go_on(self._found[first]):
                    os.write(tokens, self._shared[1:])
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
        if self._helper is not None:
            self._take()
            with suppress(EOFError):  # nothing was sent
                self._found |= self._results.recv()
            self.stop()
        found: dict[str, T] = {}
        for name, job in self._jobs.items():
            found[name] = self._found[name] if name in self._found else job()
            if len(found) == 1 and self._go_on is not None and not self._go_on(found[name]):
                break
        return found

    def stop(self) -> None:
        """Leaves undone what is not done."""
        if self._helper is not None:
            self._helper.terminate()
            self._helper.join()
            self._results.close()
            os.close(self._queue)
            self._helper = None

    def __enter__(self) -> SharedWork[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
