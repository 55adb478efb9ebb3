"""One rank: builds every contender in this process, takes turns with its peer, writes what each step took."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.benchmarks.pipelines.contenders import (
    RANKS,
    TITAN,
    TORCH,
    Contender,
    bound,
    connected,
    overhead,
    phases,
    plan_of,
    solved_plan,
    strategy_of,
    titan_contender,
    torch_bound,
    torch_contender,
)
from tests.benchmarks.pipelines.model import HIDDEN, MICRO_BATCH, SEQUENCE

SOLVED = {
    "solved": (2, 4),
    "solved, one more": (2, 6),
    "solved, one chunk": (1, 2),
    "solved, one chunk, one more": (1, 3),
    "solved, one chunk, two more": (1, 4),
}  # chunks per rank, and frames of a chunk on a rank: those of 1F1B, and of one micro-batch more, or two
STREAM = 4  # activations in a row when a transfer is timed


def transfer_seconds(rank: int) -> float:
    """One activation of some that follow each other from rank to rank, the median of some round trips: a link that
    lets a burst through has its lasting rate only after it."""
    values = [torch.zeros(MICRO_BATCH, SEQUENCE, HIDDEN) for _ in range(STREAM)]
    found = []
    for _ in range(7):
        start = time.perf_counter()
        for sender in (0, 1):
            move = dist.isend if rank == sender else dist.irecv
            for work in [move(value, 1 - rank) for value in values]:
                work.wait()
        found.append((time.perf_counter() - start) / (2 * STREAM))
    return sorted(found)[len(found) // 2]


def gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * RANKS
    dist.all_gather_object(found, value)
    return found


def contenders(rank: int, names: list[str], micro_batches: int, store: Any, interface: str) -> list[Contender]:
    """Those that were asked for, in one order on both ranks."""
    found: list[Contender] = []
    makers = {"bound": bound, "torch bound": torch_bound}
    measured: dict[int, tuple[float, float, float]] = {}
    for name in names:
        if name in makers:
            found.append(makers[name](rank, micro_batches))
        elif name.startswith("torch "):
            found.append(torch_contender(name.removeprefix("torch "), rank, micro_batches))
        else:
            if name in SOLVED and not measured:
                measured = {c: t for part in gathered(phases(rank, micro_batches)) for c, t in part.items()}
                moved = max(gathered(transfer_seconds(rank)))
            if name in SOLVED:
                plan = solved_plan(measured, moved, *SOLVED[name], micro_batches)
            else:
                plan = plan_of(strategy_of(name, micro_batches), micro_batches)
            transport = connected(plan, rank, name, store, interface)
            found.append(titan_contender(f"titan {name}", plan, rank, transport, micro_batches))
    return found


def rounds(everyone: list[Contender], number: int, warm_up: int) -> dict[str, list[tuple[float, float]]]:
    """(seconds, CPU seconds) of every contender's step of every round; each round starts with another contender."""
    for contender in everyone:
        for _ in range(warm_up):
            dist.barrier()
            contender.step()
    found: dict[str, list[tuple[float, float]]] = {c.name: [] for c in everyone}
    for turn in range(number):
        shift = turn % len(everyone)
        for contender in everyone[shift:] + everyone[:shift]:
            dist.barrier()
            cpu, start = time.process_time(), time.perf_counter()
            contender.step()
            found[contender.name].append((time.perf_counter() - start, time.process_time() - cpu))
    dist.barrier()
    return found


def resident_growth(contender: Contender, before: int) -> int:
    """Bytes by which the peak of resident memory in steps exceeds what was resident before the model was made:
    parameters, gradients, activations and whatever else a side keeps."""
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(3):
        dist.barrier()
        contender.step()
    return _status("VmHWM") - before


def touch_libraries() -> None:
    """Runs what both sides run on a few numbers: the code of the libraries is mapped, and nobody's peak."""
    few = torch.ones(1, 8)
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.GELU())
    module(few).sum().backward()
    torch.nn.functional.linear(few.to_mkldnn(), torch.ones(8, 8), torch.ones(8))


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("rank", type=int)
    parser.add_argument("--interface", default="lo")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--names", default="")
    parser.add_argument("--peak", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = options.interface
    store = dist.FileStore(str(options.folder / "meet"), RANKS)
    gate, patience = dist.PrefixStore("gate", store), timedelta(minutes=10)
    dist.init_process_group("gloo", store=gate, rank=options.rank, world_size=RANKS, timeout=patience)
    plan_of(strategy_of("one_f_one_b", options.micro_batches), options.micro_batches)  # the compiler is not the runtime
    touch_libraries()
    gc.collect()
    before = _status("VmRSS")
    names = options.names.split("|") if options.names else everyone()
    taking_part = contenders(options.rank, names, options.micro_batches, store, options.interface)
    if options.peak:
        result: dict[str, Any] = {"peak": {c.name: resident_growth(c, before) for c in taking_part}}
    else:
        result = {"times": rounds(taking_part, options.rounds, options.warm_up)}
        result["tensors"] = {c.name: c.peak() for c in taking_part if c.ours}
        if "bound" in names:
            result["overhead"] = overhead(options.rank, options.micro_batches, 5)
    (options.folder / f"rank{options.rank}.json").write_text(json.dumps(result))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # backends hold threads that end with the process


def everyone() -> list[str]:
    return ["bound", "torch bound", *(f"torch {name}" for name in TORCH), *TITAN, *SOLVED]


if __name__ == "__main__":
    main()
