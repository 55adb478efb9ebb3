"""A rank in a world that torchrun or SLURM has made: one process per rank, meeting in that world's key-value store."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from titan.compiler.plan.program import Plan
from titan.grammar.diagnostics import TitanError
from titan.runtime.control import StoreControl
from titan.runtime.devices import choose_device, own_device
from titan.runtime.failure import Failure, describe_failure
from titan.runtime.launch import Options, Outcome, Watch
from titan.runtime.run import Job, RankRun, where
from titan.runtime.world import LOOPBACK, Membership, World
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

ECHO = 3.0  # seconds in which launchers pass a signal on that the rank has from the terminal already
MEETING = timedelta(minutes=10)  # until all ranks have come


def run_joined(plan: Plan, options: Options, job: Job, place: Membership, watch: Watch | None) -> Outcome:
    """Runs this process' rank. Only the rank that failed first prints its error."""
    store = PrefixStore(f"titan/{place.generation}", meet(place))
    control = StoreControl(store)
    device = own_device(choose_device(options.device, place.local_size), place.local_rank)
    if device.type == "cpu" and place.local_size > 1:
        torch.set_num_threads(1)
    world = World(place.rank, place.size, place.local_size, store, control, device, _interface(place), place.generation)
    job = replace(job, checkpoints=_shared_folder(store, control, watch) / "checkpoints")
    run: RankRun | None = None
    with _signals(control) as received:
        try:
            run = RankRun(plan, world, job, watch.handle if watch else _nothing)
            run.run()
        except Exception as error:
            _fail(world, Failure.of(place.rank, error, where(run)), watch)
            os._exit(1)  # the backends' threads may hang on a peer that is gone
    control.close()
    result = watch.finish() if watch else None
    stopped = result is not None and result["stopped"] and received
    _leave(store, place)
    return Outcome(128 + received[0] if stopped else 0, result)


def _shared_folder(store: Store, control: StoreControl, watch: Watch | None) -> Path:
    """The run's folder, which rank 0 has chosen; checkpoints need one that all machines see."""
    if watch is not None:
        store.set("folder", str(watch.folder))
        return watch.folder
    while not store.check(["folder"]) and not control.aborted():
        time.sleep(0.01)
    return Path(store.get("folder").decode())


def meet(place: Membership) -> Store:
    """The world's store: that of torchrun's agent, or one that rank 0 opens on the meeting address and nowhere else."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if place.rank != 0 or agent:
        return TCPStore(place.address, place.port, place.size, False, timeout=MEETING)
    server = socket.create_server((place.address, place.port))
    descriptor = server.detach()
    return TCPStore(
        place.address,
        place.port,
        place.size,
        True,
        timeout=MEETING,
        wait_for_workers=False,
        master_listen_fd=descriptor,
    )


def _interface(place: Membership) -> str | None:
    """Gloo's interface: loopback when all ranks are here, else what the user names, else the default one."""
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    return named or (LOOPBACK if place.one_machine else None)


@contextmanager
def _signals(control: StoreControl) -> Iterator[list[int]]:
    """The first signal lets the running step finish and saves; the second ends this rank, and so the run, at once."""
    received: list[int] = []
    first = 0.0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if received and time.monotonic() - first < ECHO:
            return
        first = first or time.monotonic()
        received.append(number)
        if len(received) > 1:
            os._exit(128 + number)
        control.request_stop()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _fail(world: World, failure: Failure, watch: Watch | None) -> None:
    """Tells the others; prints the error when this rank is the first to do so."""
    first = failure.kind != "aborted" and _first(world)
    world.control.abort()
    if watch is not None:
        watch.progress.close()
    if first:
        from titan.grammar.diagnostics import render_all

        print(render_all(TitanError(describe_failure(failure, [failure]))), file=sys.stderr, flush=True)


def _first(world: World) -> bool:
    try:
        return bool(world.store.add("failures", 1) == 1)
    except RuntimeError:
        return True


def _leave(store: Store, place: Membership) -> None:
    """Rank 0 may host the store, so it leaves when all others have."""
    store.add("left", 1)
    until = time.monotonic() + 10
    while place.rank == 0 and store.add("left", 0) < place.size and time.monotonic() < until:
        time.sleep(0.01)


def _nothing(record: dict[str, Any]) -> None:
    """Only rank 0 watches."""
