"""Local processes that wait for work together: each call runs one function in all of them and gives their results.

They are forked and bound like the ranks of a run (private folder, loopback interface, one thread each), and end with
their parent, whatever that dies of.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from titan.grammar.diagnostics import Diagnostic, TitanError
from titan.runtime.devices import own_device
from titan.runtime.local import die_with_parent
from titan.runtime.world import LOOPBACK
from torch._C._distributed_c10d import FileStore

PATIENCE = 120.0  # seconds that members wait for each other at a barrier


@dataclass(frozen=True, slots=True)
class Member:
    """One process of a pool: what a function that runs in it is given first."""

    rank: int
    size: int
    store: FileStore
    device: torch.device
    barrier: Barrier
    kept: dict[str, Any]  # what functions leave for later ones

    def meet(self) -> None:
        """Returns when all members are here."""
        self.barrier.wait(PATIENCE)

    def synchronize(self) -> None:
        """Returns when the device has done what was asked of it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Pool(AbstractContextManager["Pool"]):
    """`size` processes; `call` may be used between entering and leaving."""

    def __init__(self, size: int, device: str = "cpu") -> None:
        self.size, self._device = size, device

    def __enter__(self) -> Pool:
        self._folder = tempfile.TemporaryDirectory(prefix="titan-")
        context = multiprocessing.get_context("fork")
        barrier, parent = context.Barrier(self.size), os.getpid()
        self._pipes: list[Connection] = []
        self._processes: list[ForkProcess] = []
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            given = (rank, self.size, Path(self._folder.name), self._device, barrier, theirs, parent)
            process = context.Process(target=_live, args=given, name=f"titan-probe-{rank}", daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`function(member, *arguments)` in every process; results by rank. Errors: T616 with the first that failed."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers = [self._answer(rank) for rank in range(self.size)]
        return answers

    def _answer(self, rank: int) -> Any:
        try:
            done, value = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(1.0)
            done, value = False, f"it ended with exit code {self._processes[rank].exitcode}"
        if not done:
            raise TitanError(Diagnostic("T616", f"measuring process {rank} failed: {value}"), exit_code=1)
        return value


def _live(rank: int, size: int, folder: Path, device: str, barrier: Barrier, pipe: Connection, parent: int) -> None:
    """A member's whole life."""
    try:
        die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.dup2(2, 1)
        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
        torch.set_num_threads(1)
        store = FileStore(str(folder / "store"), size)
        member = Member(rank, size, store, own_device(device, rank), barrier, {})
        while True:
            function, arguments = pipe.recv()
            try:
                pipe.send((True, function(member, *arguments)))
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                pipe.send((False, f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    finally:
        os._exit(0)
