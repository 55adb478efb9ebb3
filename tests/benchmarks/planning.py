"""Time of planning: `python -m tests.benchmarks.planning [--quick] [--json]`.

Every figure is of `titan plan SPEC --json` in a fresh process: start of the interpreter, reading, search, compilation,
proof and prediction. Modules are compiled to bytecode beforehand, as an installation does it.

seconds              of each shipped example, median of 5 (--quick: 1)
user_seconds         CPU time of the same processes and their children, median
peak_rss_bytes       largest resident set of any of them
over_bound           predicted step of each example over the lower bound that is printed beside it, and their median
scale                seconds for a 70B model with one sequence per device, by number of devices
growth_64_to_100000  ratio of the last to the first of them
peers                the same for searches of other planners on their own shipped problem, where an environment variable
                     names the folder of their sources; else `skipped` says which variable is missing
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
REPETITIONS = 5
PATIENCE = 1800.0  # seconds for a search of another planner
DEVICES = (64, 1024, 16_384, 100_000)
SCALE = """import models.llama
import clusters.nvidia

model   = llama.llama3_70b
cluster = nvidia.dgx_h100 with {{ nodes = {nodes} }}

train {{
    sequence     = 8Ki
    global_batch = {batch}
    precision    = bf16
    optimizer    = adamw {{ learning_rate = 3e-4 }}
    data         = tokens("corpus.tokens")
}}

minimize step_time subject to memory <= 92% of device
"""
# planner -> (variable that names its folder, command of its own documentation, run in that folder)
PEERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "calculon": (
        "CALCULON",
        (
            *("./bin/", "llm-optimal-execution", "models/turing-530B.json", "5128", "2520", "float16"),
            *("systems/a100_80g.json", os.devnull, "-m"),
        ),
    ),
    "simumax": ("SIMUMAX", ("examples/search/llm_search.py",)),
}


def environment(folder: Path) -> dict[str, str]:
    """This process's, with bytecode kept in a folder of its own."""
    given = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return {**given, "PYTHONPYCACHEPREFIX": str(folder)}


def timed(spec: Path, given: dict[str, str]) -> tuple[float, float, int, float]:
    """Wall seconds, CPU seconds and largest resident bytes of planning one spec, and its step over the lower bound.
    Raises RuntimeError if it fails."""
    command = [sys.executable, "-m", "titan.compiler.cli", "plan", str(spec), "--json"]
    started = time.perf_counter()
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(command, cwd=ROOT, env=given, stdout=printed, stderr=errors)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - started
        if process.returncode:
            errors.seek(0)
            raise RuntimeError(f"{spec.name}: exit code {process.returncode}: {errors.read().decode()}")
        printed.seek(0)
        found = json.load(printed)["predicted"]
    over = found["step_time_s"] / found["lower_bound_step_time_s"]
    return seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, over


def median(spec: Path, repetitions: int, given: dict[str, str]) -> tuple[float, float, int, float]:
    runs = [timed(spec, given) for _ in range(repetitions)]
    seconds, used = (statistics.median(r[k] for r in runs) for k in (0, 1))
    return seconds, used, max(r[2] for r in runs), runs[0][3]


def scale(repetitions: int, given: dict[str, str]) -> dict[int, tuple[float, float, int, float]]:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for devices in DEVICES:
            path = Path(folder) / f"devices_{devices}.titan"
            path.write_text(SCALE.format(nodes=devices // 8, batch=devices))
            found[devices] = median(path, repetitions, given)
    return found


def peer(variable: str, command: tuple[str, ...]) -> dict[str, Any]:
    """Seconds of another planner's search, or why there are none."""
    folder = os.environ.get(variable)
    if not folder:
        return {"skipped": f"set {variable} to the folder of its sources"}
    started = time.perf_counter()
    words = [sys.executable, *command]
    given = {**os.environ, "PYTHONPATH": folder}
    try:
        done = subprocess.run(words, cwd=folder, env=given, capture_output=True, text=True, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"skipped": f"{' '.join(command)}: {error}"}
    if done.returncode:
        return {"skipped": f"{' '.join(command)}: exit code {done.returncode}: {done.stderr[-300:]}"}
    return {"command": " ".join(command), "seconds": time.perf_counter() - started}


def benchmark(quick: bool) -> dict[str, Any]:
    repetitions = 1 if quick else REPETITIONS
    specs = sorted((ROOT / "examples").glob("*.titan"))
    with tempfile.TemporaryDirectory() as folder:
        given = environment(Path(folder))
        timed(specs[0], given)
        examples = {path.stem: median(path, repetitions, given) for path in specs}
        sizes = scale(repetitions, given)
    return {
        "seconds": {name: run[0] for name, run in examples.items()},
        "user_seconds": {name: run[1] for name, run in examples.items()},
        "peak_rss_bytes": max(run[2] for run in (*examples.values(), *sizes.values())),
        "over_bound": {
            **{name: run[3] for name, run in examples.items()},
            "median": statistics.median(run[3] for run in examples.values()),
        },
        "scale": {str(devices): run[0] for devices, run in sizes.items()},
        "growth_64_to_100000": sizes[DEVICES[-1]][0] / sizes[DEVICES[0]][0],
        "repetitions": repetitions,
        "peers": {name: peer(*given) for name, given in PEERS.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.planning", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = benchmark(given.quick)
    if given.json:
        print(json.dumps(found, indent=2))
        return
    for name, seconds in {**found["seconds"], **found["scale"]}.items():
        print(f"{name:28} {seconds:7.2f} s")
    print(f"step over its lower bound, median {found['over_bound']['median']:.3f}")
    print(f"growth from 64 to 100,000 devices {found['growth_64_to_100000']:.2f}x")
    print(f"largest resident set {found['peak_rss_bytes'] / 1e6:.0f} MB")
    for name, result in found["peers"].items():
        print(f"{name:28}", result.get("skipped") or f"{result['seconds']:.2f} s")


if __name__ == "__main__":
    main()
