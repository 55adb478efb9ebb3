"""Small trainings for tests of the launcher: a spec on two ranks and its plan."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from titan.compiler.pipeline import compile_spec
from titan.compiler.plan.program import Plan
from titan.runtime.launch import Options, Outcome, train

SPEC = """import models.tiny
import clusters.local

model   = tiny.llama with {{ vocab = {vocab}, hidden = 32, layers = 2 * dense {{ ffn = 48 }} }}
cluster = local.cpu with {{ devices_per_node = {ranks} }}

train {{
    sequence     = 16
    global_batch = {batch}
    precision    = {precision}
    optimizer    = adamw {{ learning_rate = 1e-2 }}
    warmup_steps = 1
    steps        = {steps}
    schedule     = cosine
    data         = {data}
    validation   = {{ every = 4, batches = 2 }}
    seed         = {seed}
}}

parallel {{
    {parallel}
}}
"""


def write_spec(folder: Path, parallel: str = "pipeline = 2", **values: Any) -> Path:
    """A spec for two ranks, unless said otherwise."""
    chosen = {
        "ranks": 2,
        "precision": "fp32",
        "steps": 6,
        "data": "synthetic(64)",
        "seed": 1234,
        "batch": 8,
        "vocab": 64,
    } | values
    path = folder / f"small{chosen['seed']}.titan"
    path.write_text(SPEC.format(parallel=parallel, **chosen))
    return path


def make_plan(folder: Path, parallel: str = "pipeline = 2", **values: Any) -> Plan:
    return compile_spec(write_spec(folder, parallel, **values)).plan


def go(plan: Plan, folder: Path, **options: Any) -> Outcome:
    """Trains in `folder / "log"` unless said otherwise, with ranks forked from this process."""
    return train(plan, Options(**({"root": folder, "log_dir": folder / "log"} | options)))


def environment(**extra: str) -> dict[str, str]:
    """Of a new process: one thread, no world of this one's."""
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("RANK", "WORLD", "SLURM", "TORCHEL"))
    }
    return kept | {"OMP_NUM_THREADS": "1"} | extra


def start(*arguments: str, **extra: str) -> subprocess.Popen[str]:
    """`titan` with these arguments, its output to be read."""
    command = [sys.executable, "-m", "titan.compiler.cli", *arguments]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**extra),
        start_new_session=True,
    )
