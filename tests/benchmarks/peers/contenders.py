"""Who takes part in which mode, and how its ranks are started.

Titan and torch run in this Python unless PEER_PYTHON names another for the peers; Megatron-core and torchtitan are
looked for in MEGATRON_DIR and TORCHTITAN_DIR (folders of `pip install --target`) or in that Python itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SIZES = {"LAYERS": 6, "DIM": 256, "HEADS": 16, "FFN": 768, "VOCAB": 2048, "SEQ": 128}
SEQUENCES = 8  # of a step, over all ranks
# Layers of each stage of torch's schedules, so that both ranks hold three and the head stands where it disturbs least.
STAGES = {"1F1B": "3,3", "Interleaved1F1B": "2,1,1,2", "ZBVZeroBubble": "2,1,2,1", "DualPipeV": "2,1,2,1"}


@dataclass(frozen=True)
class Contender:
    """`program` is a launcher of this folder; `package` what it must be able to import; `ours`: Titan."""

    name: str
    mode: str
    program: str
    ranks: int = 2
    environment: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    package: str = "torch"
    ours: bool = False

    @property
    def python(self) -> str:
        return sys.executable if self.ours else os.environ.get("PEER_PYTHON", sys.executable)

    @property
    def path(self) -> str:
        """PYTHONPATH: where the package was installed by itself."""
        if self.ours:
            return str(ROOT)
        return {
            "megatron.core": os.environ.get("MEGATRON_DIR", ""),
            "torchtitan": os.environ.get("TORCHTITAN_DIR", ""),
        }.get(self.package, "")

    def command(self) -> list[str]:
        if self.ours:
            return [self.python, "-m", f"tests.benchmarks.peers.{self.program}"]
        return [self.python, str(HERE / f"{self.program}.py"), *self.arguments]

    def absent(self) -> str:
        """Why it cannot take part; empty when it can."""
        return missing(self.python, self.path, self.package)


@cache
def missing(python: str, path: str, package: str) -> str:
    script = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
    found = subprocess.run(
        [python, "-c", script], env=os.environ | {"PYTHONPATH": path}, capture_output=True, check=False
    )
    return "" if found.returncode == 0 else f"{package} is not installed for {python}"


def contenders(assets: Path) -> tuple[Contender, ...]:
    """Everyone; `assets` is the folder of torchtitan's tokenizer and text."""
    return (*titan(), *torch_alone(), *megatron(), *torchtitan(assets))


def titan() -> list[Contender]:
    def row(name: str, mode: str, **choices: Any) -> Contender:
        strategy = {"micro_batches": SEQUENCES // choices.get("data", 1) // choices.get("micro_batch", 1)} | choices
        ranks = choices.get("pipeline", 1) * choices.get("tensor", 1) * choices.get("data", 1)
        return Contender(name, mode, "titan_alone", ranks, {"STRATEGY": json.dumps(strategy)}, ours=True)

    return [
        row("titan", "single", stages=(6,)),
        row("titan 1F1B", "pp2", pipeline=2, stages=(3, 3)),
        row("titan ZB-H1", "pp2", pipeline=2, stages=(3, 3), schedule="zero_bubble_h1"),
        row("titan ZB-V", "pp2", pipeline=2, stages=(2, 1, 2, 1), schedule="zero_bubble_v"),
        row("titan DualPipeV", "pp2", pipeline=2, stages=(2, 1, 2, 1), schedule="dualpipe_v"),
        row("titan", "tp2", tensor=2, stages=(6,)),
        row("titan", "dp2", data=2, stages=(6,)),
        row("titan ZeRO-1", "dp2", data=2, stages=(6,), zero=1),
        row("titan", "tp2_whole", tensor=2, stages=(6,), micro_batch=8),
        row("titan", "dp2_whole", data=2, stages=(6,), micro_batch=4),
    ]


def sizes(micro_batch: int, micro_batches: int) -> dict[str, str]:
    return {name: str(value) for name, value in (SIZES | {"MB": micro_batch, "NMB": micro_batches}).items()}


def torch_alone() -> list[Contender]:
    def row(name: str, mode: str, kind: str, each: int = SEQUENCES, size: int = 1, schedule: str = "") -> Contender:
        environment = sizes(size, each // size) | {
            "MODE": kind,
            "SCHEDULE": schedule,
            "STAGES": STAGES.get(schedule, ""),
        }
        return Contender(name, mode, "torch_alone", 1 if mode == "single" else 2, environment)

    half = SEQUENCES // 2
    return [
        row("torch", "single", "single"),
        *(row(f"torch {s}", "pp2", "pp", schedule=s) for s in STAGES),
        row("torch DTensor", "tp2", "tp"),
        row("torch DDP", "dp2", "ddp", half),
        row("torch FSDP", "dp2", "fsdp", half),
        row("torch DTensor", "tp2_whole", "tp", size=8),
        row("torch DDP", "dp2_whole", "ddp", half, 4),
    ]


def megatron() -> list[Contender]:
    def row(mode: str, each: int, size: int, **degrees: str) -> Contender:
        environment = sizes(size, each // size) | degrees
        ranks = 1 if mode == "single" else 2
        return Contender("Megatron-core", mode, "megatron_alone", ranks, environment, package="megatron.core")

    half = SEQUENCES // 2
    return [
        row("single", SEQUENCES, 1),
        row("pp2", SEQUENCES, 1, PP="2"),
        row("tp2", SEQUENCES, 1, TP="2"),
        row("dp2", half, 1),
        row("tp2_whole", SEQUENCES, 8, TP="2"),
        row("dp2_whole", half, 4),
    ]


def torchtitan(assets: Path) -> list[Contender]:
    common = [f"--job.config_file={HERE / 'torchtitan.toml'}", f"--model.hf_assets_path={assets / 'tokenizer'}"]
    common += [f"--training.dataset_path={assets / 'text'}", f"--job.dump_folder={assets / 'out'}"]
    common += ["--training.steps=1000000", f"--training.global_batch_size={SEQUENCES}"]

    def row(mode: str, size: int, *arguments: str) -> Contender:
        given = (*common, f"--training.local_batch_size={size}", *arguments)
        return Contender("torchtitan", mode, "torchtitan_alone", 2, {}, given, "torchtitan")

    degree = "--parallelism.{}_parallel_degree=2".format
    pipeline = ("--parallelism.pipeline_parallel_schedule=1F1B", "--parallelism.pipeline_parallel_microbatch_size=1")
    return [
        row("pp2", SEQUENCES, degree("pipeline"), *pipeline),
        row("tp2", 1, degree("tensor")),
        row("dp2", 1),
        row("tp2_whole", SEQUENCES, degree("tensor")),
        row("dp2_whole", SEQUENCES // 2),
    ]
