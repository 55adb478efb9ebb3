"""What can be measured of this machine, one method each; processes are started once and kept until the end."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from statistics import mean, median
from types import TracebackType
from typing import Any

import torch
from titan.compiler.plan.program import Plan
from titan.runtime.devices import choose_device
from titan.runtime.drive import SHARING
from titan.runtime.profile import communication
from titan.runtime.profile.operators import Key, watch
from titan.runtime.profile.pool import Pool

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


USUAL = 4  # ranks on a machine without GPUs


def usual_ranks(device: str) -> int:
    """As many ranks as there are GPUs, where those are meant; else a few that share the cores."""
    count = torch.cuda.device_count() if device != "cpu" and torch.distributed.is_nccl_available() else 0
    return count or USUAL


class Session(AbstractContextManager["Session"]):
    """`ranks` processes on `device` (`auto`, `cpu`, `cuda`). `cores`: processor cores that they share, 0 where each has
    a device of its own; so many of them, `alone`, run without taking each other's core."""

    def __init__(self, ranks: int, device: str = "auto") -> None:
        self.device = choose_device(device, ranks)
        self.ranks, self.cores = ranks, len(os.sched_getaffinity(0)) if self.device == "cpu" else 0
        self.alone = min(ranks, self.cores or ranks)
        self.version = torch.__version__
        self._pool, self._generation = Pool(ranks, self.device), 0

    def __enter__(self) -> Session:
        self._pool.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.__exit__(kind, error, trace)

    def watch(self, plan: Plan, warm_up: int, steps: int) -> list[tuple[dict[Key, list[float]], list[list[float]]]]:
        """By rank: seconds of operators and of instructions in the steps of a plan that follow those of its `warm_up`
        (see `operators.watch`)."""
        self._generation += 1
        members = self.alone if plan.mesh.world_size == 1 else plan.mesh.world_size
        return self._pool.call(watch, plan, members, self._generation, warm_up, steps)[:members]

    def collective(self, kind: str, members: int, size: int, times: int) -> tuple[float, float]:
        """Seconds of a collective between computations, for the mean member, and those in which it asks for it."""
        found = self._pool.call(communication.time_collective, kind, members, size, times)[:members]
        seconds, asking = (float(mean(column)) for column in zip(*found, strict=True))
        return max(seconds, 1e-7), asking

    def transfer(self, size: int, times: int) -> float:
        """Seconds of one message between computations."""
        found = self._pool.call(communication.time_transfer, size, times)[:2]
        return max(float(mean(median(rounds) for rounds in found)), 1e-7)

    def overlap(self, size: int, times: int) -> list[tuple[float, float, float]]:
        """Seconds of a gather, of compute, and of both at once, time after time in as many ranks as run without
        sharing."""
        members = max(min(self.alone, self.ranks), 2)
        found = self._pool.call(communication.time_overlap, members, size, times)[:members]
        return [row for rows in found for row in rows]

    def polling(self, seconds: float) -> tuple[float, float]:
        """(share of its speed that a computing rank loses to one that waits on its core, seconds that a wait polls)."""
        waiting = min(self.ranks - self.alone, self.alone) if self.cores else 0
        if waiting <= 0:
            return 0.0, 0.0
        alone, beside = (
            mean(self._pool.call(communication.time_polling, self.alone, n, seconds)[: self.alone])
            for n in (0, waiting)
        )
        return max(alone / beside - 1.0, 0.0) * self.alone / waiting, SHARING

    def stream(self, size: int, times: int) -> float:
        """Median bytes per second of one rank's copies while all that run without sharing copy."""
        found = self._pool.call(communication.time_stream, self.alone, size, times)[: self.alone]
        return float(median(rate for rates in found for rate in rates))

    def memory(self) -> dict[str, Any]:
        """Bytes: `total` of a device, `base` of a process without tensors, `communicator` for each of these."""
        found = self._pool.call(communication.rank_memory)
        if self.device == "cpu":
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            return {"total": total, **{key: max(f[key] for f in found) for key in ("base", "communicator")}}
        return {key: max(f[key] for f in found) for key in ("total", "base", "communicator")}
