"""Titan itself: the benchmark's spec lowered with a pinned layout, interpreted by one rank.

STRATEGY is a JSON object of strategy fields; RANK, WORLD_SIZE and the file MEET say where this process belongs.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from titan.compiler.lower import lower
from titan.compiler.plan.program import Plan
from titan.compiler.spec.resolve import load_spec
from titan.compiler.strategy import Strategy
from titan.runtime.data import SyntheticSource
from titan.runtime.drive import drive
from titan.runtime.interpreter import Executable
from titan.runtime.state import allocate
from titan.runtime.transport.process_group import ProcessGroupTransport

from tests.benchmarks.peers.gate import serve

SPEC = Path(__file__).parents[2] / "fixtures" / "peers.titan"


def compiled(choices: dict[str, Any]) -> Plan:
    """The plan of a strategy; layers in equal shares unless `stages` says otherwise."""
    spec = load_spec(SPEC)
    strategy = Strategy(**(choices | {"stages": tuple(choices["stages"])}))
    return lower(spec, strategy)


def main() -> None:
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    plan = compiled(json.loads(os.environ["STRATEGY"]))
    store = dist.FileStore(os.environ["MEET"], world)
    transport = ProcessGroupTransport(plan, rank, dist.PrefixStore("run", store))
    state = allocate(plan, rank)
    source = SyntheticSource(2048, seed=0)
    executable = Executable(plan, rank, transport, state, source)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("gate", store), rank=rank, world_size=world, timeout=timedelta(hours=1)
    )
    done = 0

    def step() -> None:
        nonlocal done
        drive(executable, done)
        done += 1

    tokens = int(plan.setting("train.global_batch")) * int(plan.setting("train.sequence"))
    parameters = sum(len(state.buffers["p." + name]) for name in plan.bucket_table if "p." + name in state.buffers)
    serve(step, dist.barrier, tokens=tokens, parameters=parameters, instructions=len(executable))


if __name__ == "__main__":
    main()
