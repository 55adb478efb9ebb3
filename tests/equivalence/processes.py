"""Runs a plan on real processes with gloo and gives what every rank ended with."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as processes
from titan.compiler.plan.program import Plan
from titan.runtime.assemble import Gradients, assemble
from titan.runtime.data import TokenSource
from titan.runtime.drive import drive
from titan.runtime.interpreter import Executable
from titan.runtime.state import allocate
from titan.runtime.transport.process_group import ProcessGroupTransport
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from tests.equivalence.comparison import Training

Steps = list[dict[str, Tensor]]


def _rank(rank: int, plan: Plan, source: TokenSource, steps: int, folder: Path, seed: int | None) -> None:
    torch.set_num_threads(1)
    state = allocate(plan, rank)
    initial = {name: value.clone() for name, value in state.parameters.items()}
    transport = ProcessGroupTransport(plan, rank, FileStore(str(folder / "store"), plan.mesh.world_size))
    gradients: dict[str, Tensor] = {}

    def capture(bucket: str, flat: Tensor) -> None:
        gradients[bucket] = flat.clone()

    executable = Executable(plan, rank, transport, state, source, delay=_delay(rank, seed), capture=capture)
    reports, kept = [], []
    for step in range(steps):
        reports.append(drive(executable, step))
        kept.append(dict(gradients))
    losses, norms = [r.loss for r in reports], [r.grad_norm for r in reports]
    torch.save((initial, losses, norms, kept, state.parameters), folder / f"rank{rank}")


def _delay(rank: int, seed: int | None) -> Callable[[int], None] | None:
    """Sleeps before one instruction in eight, up to two milliseconds."""
    if seed is None:
        return None
    drawn = random.Random(1000 * seed + rank)

    def sleep(position: int) -> None:
        if drawn.random() < 0.125:
            time.sleep(drawn.random() * 2e-3)

    return sleep


def train_processes(plan: Plan, source: TokenSource, steps: int, folder: Path, seed: int | None = None) -> Training:
    """One process per rank; with a seed each rank sleeps at random before instructions."""
    size = plan.mesh.world_size
    folder.mkdir(exist_ok=True)
    arguments = (plan, source, steps, folder, seed)
    processes.start_processes(_rank, arguments, nprocs=size, start_method="fork")
    ranks: list[Any] = [torch.load(folder / f"rank{rank}") for rank in range(size)]
    initial = assemble(plan, [(rank, found[0]) for rank, found in enumerate(ranks)])
    losses = tuple(next(v for v in values if v is not None) for values in zip(*(found[1] for found in ranks)))
    norms = tuple(ranks[0][2])
    gradients = tuple(_gradients(plan, [found[3][step] for found in ranks]) for step in range(steps))
    return Training(initial, losses, norms, gradients, assemble(plan, [(r, f[4]) for r, f in enumerate(ranks)]))


def _gradients(plan: Plan, buckets: Steps) -> dict[str, Tensor]:
    kept = Gradients(plan)
    for rank, flats in enumerate(buckets):
        keep = kept.capture(rank)
        for name, flat in flats.items():
            keep(name, flat)
    return assemble(plan, kept.pieces())
