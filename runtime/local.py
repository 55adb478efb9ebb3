"""Local ranks: forked, watched, and all ended when one of them ends badly.

They are forked from a parent that has imported torch and computed nothing with it; they meet in a file of a private
folder and talk over the loopback interface, so nothing listens beyond this machine.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from titan.compiler.plan.program import Plan
from titan.compiler.plan.text import instruction_text
from titan.grammar.diagnostics import TitanError
from titan.runtime.control import SharedControl
from titan.runtime.devices import choose_device, own_device
from titan.runtime.failure import Failure, describe_failure, first_failure
from titan.runtime.launch import Options, Outcome, Watch
from titan.runtime.run import Job, RankRun, where
from titan.runtime.world import LOOPBACK, World
from torch._C._distributed_c10d import FileStore

ECHO = 0.3  # seconds in which a second signal is the first one's echo
GRACE = 0.8  # seconds for the others to leave by themselves after a failure
_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class Ranks:
    """The processes of a run, with what they share with the parent."""

    plan: Plan
    control: SharedControl
    folder: Path
    reader: Connection
    processes: list[ForkProcess] = field(default_factory=list)
    signals: list[int] = field(default_factory=list)

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()


def run_local(plan: Plan, options: Options, job: Job, watch: Watch) -> Outcome:
    """Starts one process per rank and waits for all. Raises TitanError T616 with the first failure."""
    size = plan.mesh.world_size
    device = choose_device(options.device, size)
    with tempfile.TemporaryDirectory(prefix="titan-") as private:
        reader, writer = multiprocessing.Pipe(duplex=False)
        ranks = Ranks(plan, SharedControl(size), Path(private), reader)
        watch.progress.say(_greeting(plan, device, job))
        with _signals(ranks, watch):
            _start(ranks, job, device, writer)
            writer.close()
            try:
                failures = _wait(ranks, watch)
            finally:
                ranks.kill()
                for process in ranks.processes:
                    process.join()
        if failures or len(ranks.signals) > 1:
            watch.progress.close()
        if len(ranks.signals) > 1:
            watch.progress.say("stopped at once; what was done since the last save is lost")
            return Outcome(128 + ranks.signals[0], None)
        if failures:
            raise TitanError(describe_failure(first_failure(failures), failures), exit_code=1)
    result = watch.finish()
    return Outcome(128 + ranks.signals[0] if result["stopped"] and ranks.signals else 0, result)


def _greeting(plan: Plan, device: str, job: Job) -> str:
    axes = " x ".join(f"{name} {size}" for name, size in plan.mesh.factors if size > 1) or "one rank"
    size = plan.mesh.world_size
    backend = "NCCL on CUDA devices" if device == "cuda" else "gloo on this machine's cores"
    begin = f", going on after step {job.first}" if job.saved else ""
    return f"{size} rank{'s' if size > 1 else ''} ({axes}), {backend}; to step {job.stop}{begin}"


@contextmanager
def _signals(ranks: Ranks, watch: Watch) -> Iterator[None]:
    """The first interrupt lets the running step finish and saves; the second ends the run at once. Some senders signal
    a process and its group, so an echo is not a second one."""
    first = 0.0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if ranks.signals and time.monotonic() - first < ECHO:
            return
        first = first or time.monotonic()
        ranks.signals.append(number)
        if len(ranks.signals) == 1:
            ranks.control.request_stop()
            watch.progress.say("stopping: the running step is finished and saved (once more: stop at once)")
        else:
            ranks.control.abort()
            ranks.kill()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(ranks: Ranks, job: Job, device: str, writer: Connection) -> None:
    """Forks the ranks; nothing but these functions' arguments is handed over, by the fork itself."""
    sys.stdout.flush()
    sys.stderr.flush()
    context = multiprocessing.get_context("fork")
    parent = os.getpid()
    for rank in range(ranks.plan.mesh.world_size):
        process = context.Process(
            target=_child, args=(ranks, job, device, rank, parent, writer), name=f"titan-rank-{rank}", daemon=True
        )
        process.start()
        ranks.processes.append(process)


def _wait(ranks: Ranks, watch: Watch) -> list[Failure]:
    """Handles records until every rank has ended; after a failure the others get a short grace."""
    deadline: float | None = None
    while alive := [p for p in ranks.processes if p.exitcode is None]:
        wait([ranks.reader, *(p.sentinel for p in alive)], timeout=0.2)
        _drain(ranks.reader, watch.handle)
        failed = any(p.exitcode not in (None, 0) for p in ranks.processes)
        if failed and deadline is None:
            ranks.control.abort()
            deadline = time.monotonic() + GRACE
        if deadline is not None and time.monotonic() > deadline:
            break
    _drain(ranks.reader, watch.handle)
    dead = [(rank, process.exitcode) for rank, process in enumerate(ranks.processes)]
    return [_failure(ranks, rank, code) for rank, code in dead if code not in (None, 0)]


def _drain(reader: Connection, handle: Callable[[dict[str, Any]], None]) -> None:
    try:
        while reader.poll():
            handle(json.loads(reader.recv_bytes()))
    except (EOFError, OSError):
        return


def _failure(ranks: Ranks, rank: int, code: int | None) -> Failure:
    """What the rank has written about its end; of one that was killed, where it was last seen."""
    path = ranks.folder / f"rank-{rank}.json"
    if path.exists():
        return Failure.read(path)
    step, position, order = ranks.control.recorded(rank)
    place = "before the first step" if step < 0 else _place(ranks.plan, rank, step, position, order)
    if code is not None and code < 0:
        name = signal.Signals(-code).name if -code in {s.value for s in signal.Signals} else str(-code)
        return Failure(rank, "killed", "", f"it was killed by {name}", place, "", time.time())
    return Failure(rank, "error", "", f"it ended with exit code {code}", place, "", time.time())


def _place(plan: Plan, rank: int, step: int, position: int, order: str) -> str:
    for number, (*_, instruction) in enumerate(plan.role_of(rank).instructions(order)):
        if number == position:
            return f"step {step + 1}, instruction {position} `{' '.join(instruction_text(instruction).split())}`"
    return f"step {step + 1}, its end"


# --- in the child


def _child(ranks: Ranks, job: Job, device: str, rank: int, parent: int, writer: Connection) -> None:
    """A rank's whole life. It leaves by `os._exit`: the backends' threads may hang on a peer that is gone."""
    code = 1
    try:
        _settle(ranks, rank, parent)
        world = _world(ranks, rank, device)
        code = _live(ranks.plan, world, job, writer, ranks.folder)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _live(plan: Plan, world: World, job: Job, writer: Connection, folder: Path) -> int:
    run: RankRun | None = None
    try:
        run = RankRun(plan, world, job, lambda record: writer.send_bytes(json.dumps(record).encode()))
        run.run()
        return 0
    except BaseException as error:  # a rank that fails in any way must say so
        failure = Failure.of(world.rank, error, where(run))
        failure.write(folder / f"rank-{world.rank}.json")
        world.control.abort()
        return 1


def _settle(ranks: Ranks, rank: int, parent: int) -> None:
    """Dies with its parent, leaves interrupts to it, prints nothing to stdout, computes with one thread."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: ranks.control.request_stop())
    os.dup2(2, 1)
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    if ranks.plan.mesh.world_size > 1:
        torch.set_num_threads(1)


def die_with_parent(parent: int) -> None:
    """The kernel kills this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _world(ranks: Ranks, rank: int, device: str) -> World:
    size = ranks.plan.mesh.world_size
    store = FileStore(str(ranks.folder / "store"), size)
    return World(rank, size, size, store, ranks.control, own_device(device, rank))
