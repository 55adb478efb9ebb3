"""Titan beside torch alone, Megatron-core and torchtitan, on one model, in one run.

usage: python -m tests.benchmarks.peers [--quick] [--only pp2,tp2] [--rounds N] [--steps N] --json

The model is torchtitan's debug model (Llama style, 6 layers, 6,163,712 parameters), sequence 128, 8 sequences a step
in micro-batches of 1, float32, AdamW, gradients clipped by their global norm: the same work for everyone, two gloo
ranks with one thread each. All contenders of a mode are started, then they take turns: in each round each one runs a
few steps while the others are idle, so that what else the machine does falls on all alike. A step's time is that of
its slowest rank; a round's is the median of its steps. `ratio_to_best` is the median over rounds of (tokens/s of
Titan's best form) / (the best peer's in the same round). Modes tp2_whole and dp2_whole (only on demand) give each rank
its share of the batch at once.

Peers are found by package. Setting them up, in an environment of their own:
    pip install torch==2.13.0 numpy transformers datasets tokenizers triton
    pip install torchdata tyro tensorboard wandb einops tomli fsspec
    pip install --no-deps --target MEGATRON megatron-core==0.16.1
    pip install --no-deps --target TORCHTITAN torchtitan==0.2.2
    export PEER_PYTHON=.../bin/python MEGATRON_DIR=MEGATRON TORCHTITAN_DIR=TORCHTITAN
What is not there is reported as absent; torch alone runs in this Python if no other is named.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.peers.contenders import HERE, Contender, contenders
from tests.benchmarks.peers.ranks import Failed, Ranks

DEMANDED = ("pp2", "tp2", "dp2")  # with a ratio in the result, always
MODES = (*DEMANDED, "single")
TOKENS = 1024
BUDGET = 170.0  # seconds of a quick run


@dataclass
class Runner:
    """One contender with its processes and what it has measured: step seconds by round."""

    contender: Contender
    ranks: Ranks | None = None
    problem: str = ""
    rounds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    parameters: int = 0

    def turn(self, steps: int) -> None:
        if self.ranks is None:
            return
        try:
            seconds, cpu = self.ranks.steps(steps)
        except (Failed, OSError) as error:
            self.fail(str(error))
            return
        self.rounds.append(statistics.median(seconds))
        self.cpu.append(cpu / steps)

    def fail(self, problem: str) -> None:
        self.problem = problem
        self.close()

    def close(self) -> None:
        if self.ranks is not None:
            self.ranks.close()
            self.ranks = None


def start(chosen: list[Contender], folder: Path) -> list[Runner]:
    """All contenders of a mode, each ready before its first step; a few are started at a time."""
    runners = [Runner(c, problem=c.absent()) for c in chosen]
    waiting = [(number, r) for number, r in enumerate(runners) if not r.problem]
    for first in range(0, len(waiting), 3):
        group = waiting[first : first + 3]
        for number, runner in group:
            runner.ranks = Ranks(runner.contender, folder / f"{runner.contender.mode}-{number}")
        for _, runner in group:
            assert runner.ranks is not None
            try:
                runner.parameters = int(runner.ranks.ready()["parameters"])
            except Failed as error:
                runner.fail(str(error))
    return runners


def measure(chosen: list[Contender], folder: Path, rounds: int, steps: int, until: float) -> list[Runner]:
    """One mode; the first two steps of each are not counted. At least three rounds, no new ones after `until`."""
    runners = start(chosen, folder)
    try:
        for runner in runners:
            runner.turn(2)
            runner.rounds.clear()
            runner.cpu.clear()
        for number in range(rounds):
            if number >= 3 and time.monotonic() > until:
                break
            for runner in runners if number % 2 == 0 else reversed(runners):
                runner.turn(steps)
    finally:
        for runner in runners:
            runner.close()
    return runners


def ratio(runners: list[Runner]) -> dict[str, Any] | None:
    """The best form of Titan against the best peer, both by their medians, round by round; with a 95 % interval of the
    median by order statistics."""
    alive = [r for r in runners if not r.problem and r.rounds]
    ours, theirs = ([r.rounds for r in alive if r.contender.ours == wanted] for wanted in (True, False))
    if not ours or not theirs:
        return None
    mine, best = (min(times, key=statistics.median) for times in (ours, theirs))
    found = sorted(peer / own for own, peer in zip(mine, best))
    off = max(0, round(len(found) / 2 - 0.98 * len(found) ** 0.5) - 1)
    return {"median": statistics.median(found), "low": found[off], "high": found[-1 - off], "rounds": len(found)}


def row(runner: Runner) -> dict[str, Any]:
    base = {"peer": runner.contender.name, "mode": runner.contender.mode}
    if runner.problem or not runner.rounds:
        return base | {"absent": runner.problem or "not measured"}
    speeds = sorted(TOKENS / seconds for seconds in runner.rounds)
    middle = statistics.median(speeds)
    return base | {
        "tokens_per_s": round(middle, 1),
        "spread": round((speeds[-1] - speeds[0]) / middle, 3),
        "step_s": round(statistics.median(runner.rounds), 4),
        "cpu_s": round(statistics.median(runner.cpu), 4),
        "rounds": len(speeds),
    }


def show(rows: list[dict[str, Any]], ratios: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("mode", "peer", "tokens/s", "spread", "step ms", "CPU ms a step")
    for found in rows:
        if "absent" in found:
            table.add_row(found["mode"], found["peer"], "absent", "", "", found["absent"])
            continue
        figures = (f"{found['tokens_per_s']:.0f}", f"{found['spread']:.0%}", f"{1e3 * found['step_s']:.1f}")
        table.add_row(found["mode"], found["peer"], *figures, f"{1e3 * found['cpu_s']:.0f}")
    console = Console(stderr=True)
    console.print(table)
    for mode, found in ratios.items():
        if found is not None:
            text = f"{mode}: Titan / best peer {found['median']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"
            console.print(text, highlight=False)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.peers")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, within three minutes on two cores")
    parser.add_argument("--only", default="", help="modes or names, with commas: pp2,titan,torch")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help="steps of a contender in a round")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def select(everyone: tuple[Contender, ...], only: str) -> list[Contender]:
    """Modes narrow modes, other words names; on-demand modes run only when named."""
    words = [word.strip().lower() for word in only.split(",") if word.strip()]
    known = {c.mode for c in everyone}
    modes = [w for w in words if w in known] or list(MODES)
    names = [w for w in words if w not in known]
    return [c for c in everyone if c.mode in modes and (not names or any(n in c.name.lower() for n in names))]


def run(options: argparse.Namespace) -> dict[str, Any]:
    started = time.monotonic()
    rounds = options.rounds or (7 if options.quick else 12)
    steps = options.steps or (1 if options.quick else 3)
    rows, ratios = [], {}
    with tempfile.TemporaryDirectory(prefix="titan-peers-") as name:
        folder = Path(name)
        chosen = select(contenders(folder / "assets"), options.only)
        if any(c.package == "torchtitan" and not c.absent() for c in chosen):
            python = next(c.python for c in chosen if c.package == "torchtitan")
            subprocess.run([python, str(HERE / "assets.py"), str(folder / "assets")], check=True, capture_output=True)
        modes = sorted({c.mode for c in chosen}, key=[*MODES, *(c.mode for c in chosen)].index)
        for number, mode in enumerate(modes):
            until = started + BUDGET * (number + 1) / len(modes) - 5 if options.quick else float("inf")
            runners = measure([c for c in chosen if c.mode == mode], folder, rounds, steps, until)
            rows += [row(runner) for runner in runners]
            ratios[mode] = ratio(runners)
    show(rows, ratios)
    medians = {mode: found and round(found["median"], 4) for mode, found in ratios.items()}
    intervals = {mode: found and [round(found["low"], 4), round(found["high"], 4)] for mode, found in ratios.items()}
    return {
        "peers": rows,
        "ratio_to_best": dict.fromkeys(DEMANDED) | medians,
        "ratio_interval": intervals,
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> int:
    options = arguments()
    result = run(options)
    if options.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
