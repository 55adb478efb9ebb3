"""Flags beside the plan's own communication: abort, stop, and the flight recorder.

Stopping must happen at the same step on every rank. Rank 0 announces the last step before it begins that step; the
others read the announcement when they have finished it. A step holds a sum over all ranks (the gradient norm), so none
can finish it before rank 0 has begun it: whoever reads, reads the same.
"""

from __future__ import annotations

import mmap
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

NEVER = 1 << 62
POLL = 0.25  # seconds between two looks at a store's flags
LEAVE = 2.0  # seconds that a rank of an aborted run has to leave by itself


class Control(ABC):
    """One rank's view of the flags."""

    @abstractmethod
    def aborted(self) -> bool:
        """The run is over; cheap, asked while waiting."""

    @abstractmethod
    def abort(self) -> None: ...

    @abstractmethod
    def request_stop(self) -> None:
        """Asks rank 0 to let the next step be the last."""

    @abstractmethod
    def stop_requested(self) -> bool: ...

    @abstractmethod
    def announce_last(self, step: int) -> None:
        """Rank 0, before it begins `step`."""

    @abstractmethod
    def last_step(self) -> int:
        """The announced last step, NEVER while there is none; asked after a step."""

    @abstractmethod
    def mark(self, rank: int, step: int, order: str) -> None:
        """Flight recorder: the rank begins a step of an order."""

    def recorder(self, rank: int) -> Callable[[int], None] | None:
        """Flight recorder: called with the position of each instruction that the rank begins; None: not kept."""
        return None


_ABORT, _STOP, _LAST, _RECORDS = 0, 1, 2, 3
_ORDERS = ("train", "evaluate")


class SharedControl(Control):
    """Flags of the ranks of one machine in memory that they share with their parent by fork."""

    def __init__(self, ranks: int) -> None:
        self._words = memoryview(mmap.mmap(-1, 8 * (_RECORDS + 3 * ranks))).cast("q")
        self._words[_LAST] = NEVER
        for rank in range(ranks):
            self._words[_RECORDS + 3 * rank] = -1

    def aborted(self) -> bool:
        return self._words[_ABORT] != 0

    def abort(self) -> None:
        self._words[_ABORT] = 1

    def request_stop(self) -> None:
        self._words[_STOP] = 1

    def stop_requested(self) -> bool:
        return self._words[_STOP] != 0

    def announce_last(self, step: int) -> None:
        self._words[_LAST] = step

    def last_step(self) -> int:
        return self._words[_LAST]

    def mark(self, rank: int, step: int, order: str) -> None:
        own = _RECORDS + 3 * rank
        self._words[own] = step
        self._words[own + 1] = 0
        self._words[own + 2] = _ORDERS.index(order)

    def recorder(self, rank: int) -> Callable[[int], None]:
        words, slot = self._words, _RECORDS + 3 * rank + 1

        def record(position: int) -> None:
            words[slot] = position

        return record

    def recorded(self, rank: int) -> tuple[int, int, str]:
        """Step (-1: none begun), position and order at which a rank was last seen."""
        step, position, order = self._words[_RECORDS + 3 * rank : _RECORDS + 3 * rank + 3]
        return step, position, _ORDERS[order]


class StoreControl(Control):
    """Flags in the key-value store of a world that others have made; a thread looks at them a few times a second."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._aborted = self._stop = False
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="titan-flags", daemon=True).start()

    def _watch(self) -> None:
        told = False
        while not self._aborted and not self._closed.wait(POLL):
            try:
                if self._stop and not told:
                    self._store.set("stop", "1")
                    told = True
                self._stop = self._stop or self._store.check(["stop"])
                self._aborted = self._aborted or self._store.check(["abort"])
            except RuntimeError:  # the store's host is gone, and with it the run
                self._aborted = True
        if self._aborted and not self._closed.wait(LEAVE):
            os._exit(1)  # this rank hangs where no flag is looked at: while connections are made

    def close(self) -> None:
        """Ends the thread: the store may go away from now on."""
        self._closed.set()

    def aborted(self) -> bool:
        return self._aborted

    def abort(self) -> None:
        self._aborted = True
        try:
            self._store.set("abort", "1")
        except RuntimeError:
            return

    def request_stop(self) -> None:
        self._stop = True  # the thread tells the store: a signal's handler must not wait for it

    def stop_requested(self) -> bool:
        return self._stop

    def announce_last(self, step: int) -> None:
        self._store.add("last", step + 1)  # unlike `set`, it returns only when the store has it

    def mark(self, rank: int, step: int, order: str) -> None:
        """Kept by the rank alone: a killed rank's last place is not known to others."""

    def last_step(self) -> int:
        return self._store.add("last", 0) - 1 if self._store.check(["last"]) else NEVER
