"""Which world a process belongs to: one that torchrun or SLURM has made, or none, and then ranks are started here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan.grammar.diagnostics import Diagnostic, TitanError

if TYPE_CHECKING:
    import torch
    from titan.runtime.control import Control
    from torch._C._distributed_c10d import Store

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True, slots=True)
class World:
    """One rank's place: where it meets the others, what it computes on, the flags.

    `local_size` ranks share this machine; `interface` is gloo's network interface, None for the default one;
    `generation` separates restarts in one store.
    """

    rank: int
    size: int
    local_size: int
    store: Store
    control: Control
    device: torch.device
    interface: str | None = LOOPBACK
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Membership:
    """What the environment says about a world made by others. `local_size` ranks share this machine."""

    maker: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    generation: int

    @property
    def one_machine(self) -> bool:
        return self.local_size == self.size


def membership(environment: Mapping[str, str] = os.environ) -> Membership | None:
    """The world of torchrun (or of any launcher with its variables), or of `srun`; None when there is none.

    Errors: T608 when the variables are there but are not numbers or contradict each other.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _torchrun(environment)
    if "SLURM_PROCID" in environment and int(environment.get("SLURM_STEP_NUM_TASKS", "1") or 1) > 1:
        return _slurm(environment)
    return None


def _torchrun(environment: Mapping[str, str]) -> Membership:
    size = _number(environment, "WORLD_SIZE")
    rank = _number(environment, "RANK")
    _check_rank(rank, size)
    return Membership(
        "torchrun",
        rank,
        size,
        _number(environment, "LOCAL_RANK", rank),
        _number(environment, "LOCAL_WORLD_SIZE", size if environment.get("MASTER_ADDR") in _HERE else 1),
        environment.get("MASTER_ADDR", "127.0.0.1"),
        _number(environment, "MASTER_PORT", 29500),
        _number(environment, "TORCHELASTIC_RESTART_COUNT", 0),
    )


_HERE = ("localhost", "127.0.0.1", "::1")


def _slurm(environment: Mapping[str, str]) -> Membership:
    """One task per rank. The first host of the step is the meeting place; the port follows from the job's number, so
    that two jobs on one host do not meet."""
    rank, size = _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_STEP_NUM_TASKS")
    _check_rank(rank, size)
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "localhost")
    local = environment.get("SLURM_STEP_TASKS_PER_NODE", "1").split("(")[0].split(",")[0]
    one = _number(environment, "SLURM_STEP_NUM_NODES", 1) == 1
    return Membership(
        "SLURM",
        rank,
        size,
        _number(environment, "SLURM_LOCALID", 0),
        size if one else int(local),
        environment.get("MASTER_ADDR") or ("127.0.0.1" if one else first_host(nodes)),
        _number(environment, "MASTER_PORT", 20000 + _number(environment, "SLURM_JOB_ID", 0) % 20000),
        _number(environment, "SLURM_RESTART_COUNT", 0),
    )


def first_host(nodes: str) -> str:
    """First host of a SLURM list: `node[007-012,20],other3` -> `node007`; `scontrol` is asked for intricate ones."""
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return head.split(",")[0]
    numbers, _, tail = rest.partition("]")
    if "[" in tail.split(",")[0]:
        shown = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
        return shown.stdout.split()[0]
    return head + numbers.split(",")[0].split("-")[0] + tail.split(",")[0]


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "" if default is None else str(default))
    if not text.strip().isdigit():
        message = f"the environment has {name}={text!r}, which must be a whole number"
        raise TitanError(Diagnostic("T608", message))
    return int(text)


def _check_rank(rank: int, size: int) -> None:
    if not rank < size:
        raise TitanError(Diagnostic("T608", f"the environment gives rank {rank} of {size} ranks; ranks count from 0"))
