"""Steps on demand: a rank waits for a number on stdin, runs that many steps and answers with their times.

So that many peers can be alive at once and take turns, round by round, each idle while the others run. Imported by
every launcher of this folder, also from another Python: standard library only.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

MARK = "@gate "


def say(**values: Any) -> None:
    """One answer to the parent; other lines on stdout are not for it."""
    print(MARK + json.dumps(values), flush=True)


def requests() -> list[int]:
    """The next number of steps, as a list of one; empty when the parent is done with this rank."""
    line = sys.stdin.readline()
    return [int(line)] if line.strip() else []


class Gate:
    """`enter` before a step, `leave` after it; `enter` returns False when there is nothing more to do."""

    def __init__(self, barrier: Callable[[], object]) -> None:
        self._barrier, self._left = barrier, 0
        self._seconds: list[float] = []
        self._cpu = self._start = 0.0

    def enter(self) -> bool:
        if self._left == 0:
            if self._seconds:
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
                say(seconds=self._seconds, cpu=time.process_time() - self._cpu, peak_bytes=peak)
                self._seconds = []
            wanted = requests()
            if not wanted:
                return False
            self._left = wanted[0]
            self._cpu = time.process_time()
        self._barrier()
        self._start = time.perf_counter()
        return True

    def leave(self) -> None:
        self._seconds.append(time.perf_counter() - self._start)
        self._left -= 1


def serve(step: Callable[[], object], barrier: Callable[[], object], **description: Any) -> None:
    """Says that the rank is ready, then steps as it is asked to; ends the process at once when the parent goes away."""
    gate = Gate(barrier)
    say(ready=True, **description)
    while gate.enter():
        step()
        gate.leave()
    sys.stdout.flush()
    os._exit(0)
