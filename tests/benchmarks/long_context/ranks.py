"""One process per rank: what each did in its steps."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as processes
from titan.compiler.plan.program import Plan
from titan.compiler.plan.segment import parse_unit
from titan.compiler.verify.rings import in_ring
from titan.runtime.data import SyntheticSource
from titan.runtime.interpreter import Executable
from titan.runtime.state import allocate
from titan.runtime.transport.process_group import (
    ProcessGroupChannel,
    ProcessGroupCommunicator,
    ProcessGroupTransport,
)
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from tests.benchmarks.long_context.model import VOCAB
from tests.benchmarks.slow_link import End
from tests.runtime.alone import Storages


@dataclass(frozen=True, slots=True)
class Ran:
    """One rank. Per step: loss, seconds, those of them on a processor, those in attention, and those of each wait for a
    transfer around the ring.
    `sent`: bytes that it gave to others in a step, without gradients of parameters; most bytes of registers by the
    plan, and of tensors that the step made as they were counted (0 where nobody counted)."""

    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    processor: tuple[float, ...]
    attention: tuple[float, ...]
    waits: tuple[tuple[float, ...], ...]
    sent: int
    registers: int
    tensors: int


class Watch:
    """Times of one rank's instructions while it runs."""

    def __init__(self, executable_plan: Plan, rank: int) -> None:
        listed = [i for *_, i in executable_plan.role_of(rank).instructions()]
        ring = {i.writes[0] for i in listed if in_ring(i)}
        table = executable_plan.segment_table
        self.waits = [i.opcode == "wait" and i.reads[0] in ring for i in listed]
        self.attention = [bool(i.unit) and _attends(table[parse_unit(i.unit)[0]].body) for i in listed] + [False]
        self.began, self.position = 0.0, len(listed)
        self.spent = 0.0

    def __call__(self, position: int) -> None:
        """Before each instruction."""
        now = time.perf_counter()
        if self.attention[self.position]:
            self.spent += now - self.began
        self.began, self.position = now, position


def _attends(body: Any) -> bool:
    return any(call.operator.startswith("attention") for call in body)


@dataclass(frozen=True, slots=True)
class Watching:
    """`count` bytes of tensors too (slower); `tell` each step to stderr as it ends."""

    count: bool = False
    tell: bool = False


def run(found: Plan, steps: int, ends: tuple[End, ...] = (), watching: Watching = Watching()) -> tuple[Ran, ...]:
    """One process per rank, inside the namespaces `ends` if there are any."""
    with tempfile.TemporaryDirectory() as name:
        folder, size = Path(name), found.mesh.world_size
        processes.start_processes(_rank, (found, steps, folder, ends, watching), nprocs=size, start_method="fork")
        return tuple(torch.load(folder / f"rank{rank}", weights_only=False) for rank in range(size))


def _rank(rank: int, found: Plan, steps: int, folder: Path, ends: tuple[End, ...], watching: Watching) -> None:
    torch.set_num_threads(1)
    if ends:
        ends[rank].enter()
    sent = _count_bytes()
    store = FileStore(str(folder / "store"), found.mesh.world_size)
    transport = ProcessGroupTransport(found, rank, store, interface=ends[rank].interface if ends else "lo")
    watch = Watch(found, rank)
    state, source = allocate(found, rank), SyntheticSource(VOCAB, seed=3)
    executable = Executable(found, rank, transport, state, source, delay=watch)
    reports, seconds, processor, attention, waits = [], [], [], [], []
    with Storages() if watching.count else nullcontext() as storages:
        for step in range(steps):
            start, began, watch.spent = time.perf_counter(), time.process_time(), 0.0
            report, waited = _step(executable, step, watch)
            seconds.append(time.perf_counter() - start)
            processor.append(time.process_time() - began)
            attention.append(watch.spent)
            reports.append(report)
            waits.append(tuple(waited))
            if watching.tell and rank == 0:
                print(f"step {step + 1}: loss {report.loss:.4f}, {seconds[-1]:.1f} s", file=sys.stderr, flush=True)
    ran = Ran(
        losses=tuple(float(r.loss) for r in reports),
        seconds=tuple(seconds),
        processor=tuple(processor),
        attention=tuple(attention),
        waits=tuple(waits),
        sent=sent[0] // steps,
        registers=reports[-1].peak_bytes,
        tensors=storages.peak if storages else 0,
    )
    torch.save(ran, folder / f"rank{rank}")


def _step(executable: Executable, step: int, watch: Watch) -> tuple[Any, list[float]]:
    """The step's report, and the seconds of each wait for the ring."""
    waited = {n: 0.0 for n, around in enumerate(watch.waits) if around}
    run = executable.run(step)
    while True:
        try:
            handle = next(run)
        except StopIteration as end:
            return end.value, list(waited.values())
        began = time.perf_counter()
        while not handle.done():
            handle.settle(2e-2)
        if executable.position in waited:
            waited[executable.position] += time.perf_counter() - began


def _count_bytes() -> list[int]:
    """Bytes that this process sends from now on: around rings, and in collectives that convert layouts."""
    total = [0]

    def counted(kind: type, name: str, share: Callable[[Any, Tensor], float]) -> None:
        method = getattr(kind, name)

        def call(self: Any, value: Tensor, *arguments: Any) -> Any:
            total[0] += round(value.nbytes * share(self, value))
            return method(self, value, *arguments)

        setattr(kind, name, call)

    counted(ProcessGroupChannel, "send", lambda channel, value: 1.0)
    counted(ProcessGroupCommunicator, "all_gather", lambda group, value: group.size - 1.0)
    for name in ("all_to_all", "reduce_scatter"):
        counted(ProcessGroupCommunicator, name, lambda group, value: (group.size - 1) / group.size)
    return total
