"""No false OOM: `python -m tests.benchmarks.no_false_oom [--quick] [--json]`.

Every rank is a process with a hard limit on its data (RLIMIT_DATA, set after a warm-up step to what it holds then, the
budget and a stated slack for the allocator). Either another user of memory takes up to 30 % of the budget at a random
instruction and gives it back later, on all ranks or on one; or sequences are a quarter longer than those for which the
budget was made. It holds the peak with everything recomputed and either pressure below the high mark. The fixed plan is
the fastest one without pressure: nothing is recomputed.

runs             randomized runs of each plan; every second one has two ranks (gloo); `pressures`: of which kind
fixed_died       runs in which the fixed plan died of a failed allocation; adaptive_died the same of the adaptive plan
hangs            runs that neither ended nor died in time
overhead_pct     adaptive against fixed without pressure: median of per-round ratios of step times, in percent, with its
                 interval `overhead_interval_pct` (quartiles)
recomputes_without_pressure   rebuilds of the adaptive plan when the peak without any lies below the high mark
budget_sweep_ok  from the peak without recompute down to that with all: no failed allocation, monotone recompute, ledger
                 within the budget at every point; below it no plan is given (`sweep`: budget, calls run again, peak)
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as processes
from titan.compiler.lower import lower
from titan.compiler.plan.program import Plan
from titan.compiler.plan.segment import TIERS
from titan.compiler.plan.sizes import liveness
from titan.compiler.search.search import search
from titan.compiler.spec.resolve import resolve
from titan.compiler.spec.schema import Spec
from titan.compiler.strategy import Strategy
from titan.grammar.diagnostics import TitanError
from titan.grammar.parser import parse
from titan.runtime.data import SyntheticSource
from titan.runtime.drive import drive
from titan.runtime.interpreter import Executable
from titan.runtime.reading import CpuReading, data_bytes, out_of_memory, reusable_bytes
from titan.runtime.state import allocate
from titan.runtime.transport.loopback import Loopback
from titan.runtime.transport.process_group import ProcessGroupTransport
from titan.runtime.watermark import HIGH
from torch._C._distributed_c10d import FileStore

LENGTH, LONG = 512, 640  # tokens of a sequence: as the budget expects them, and as they may come
SLACK = 3 << 20  # bytes: fragments of the allocator, Python's own objects
STEPS = 2
PATIENCE = 30.0  # seconds until a run hangs
TEXT = """import clusters.local
model = model {{
    vocab = 64, hidden = 64, layers = 4 * dense {{ ffn = 256, activation = gelu_tanh, bias = true }}
    attention = gqa {{ heads = 2, kv_heads = 2, head_dim = 32, bias = true, out_bias = true }}
    max_positions = {longest}, norm = layer_norm, positions = learned, dropout = 0.1
}}
cluster = local.cpu with {{ devices_per_node = {ranks} }}
train {{
    sequence = {sequence}, global_batch = {batch}, precision = fp32, steps = 4, data = synthetic(64)
    optimizer = adamw {{ learning_rate = 1e-3 }}
}}
parallel {{ data = {ranks}, micro_batch = 4, recompute = {recompute} }}
"""


def spec_of(ranks: int, recompute: str = "adaptive", sequence: int = LENGTH) -> Spec:
    text = TEXT.format(ranks=ranks, batch=8 * ranks, recompute=recompute, sequence=sequence, longest=LONG)
    return resolve(parse(text, "no_false_oom.titan"), Path())


@cache
def plan_of(ranks: int, recompute: str, sequence: int = LENGTH) -> Plan:
    layout = Strategy(data=ranks, micro_batch=4, micro_batches=2, stages=(4,), recompute=recompute)
    return lower(spec_of(ranks, sequence=sequence), layout)


def peak(recompute: str, sequence: int = LENGTH) -> int:
    plan = plan_of(1, recompute, sequence)
    return liveness(plan, plan.roles[0]).peak


@dataclass(frozen=True)
class Run:
    """What happens to one run: bytes taken from (step, share of the program) to another such point, on which ranks; or
    nothing is taken, but sequences are long."""

    ranks: int
    budget: int
    taken: int
    begin: tuple[int, float]
    end: tuple[int, float]
    pressed: tuple[int, ...]
    sequence: int = LENGTH

    @property
    def pressure(self) -> str:
        if self.sequence != LENGTH:
            return "longer sequences"
        return "allocation on one rank" if len(self.pressed) < self.ranks else "allocation on all ranks"


def draw(number: int, budget: int) -> Run:
    drawn = random.Random(number)
    ranks = 2 if number % 2 else 1
    first, last = sorted((drawn.randrange(STEPS), drawn.random()) for _ in range(2))
    pressed = (drawn.randrange(ranks),) if drawn.random() < 0.5 else tuple(range(ranks))
    if drawn.random() < 0.3:
        return Run(ranks, budget, 0, first, last, (), LONG)
    return Run(ranks, budget, int(budget * drawn.uniform(0.2, 0.3)), first, last, pressed)


def return_freed_memory() -> None:
    """Tensors come from the system one by one and go back to it: what counts against the limit is what is held."""
    library = ctypes.CDLL(None)
    for name, value in ((-3, 1 << 16), (-1, 1 << 17), (-2, 0)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD
        library.mallopt(name, value)


class Other:
    """Another user of the rank's memory. What it takes while none is free has to be made room for first."""

    def __init__(self, run: Run, active: bool) -> None:
        self.run, self.active, self.step = run, active, -1
        self.held: torch.Tensor | None = None
        self.executable: Executable | None = None

    def __call__(self, position: int) -> None:
        if not self.active or self.step < 0 or self.executable is None:
            return
        now = (self.step, position / len(self.executable))
        if self.held is None and self.run.begin <= now < self.run.end:
            self.held = self.take(position)
        elif now >= self.run.end:
            self.held = None

    def take(self, position: int) -> torch.Tensor:
        assert self.executable is not None
        while True:
            try:
                return torch.empty(self.run.taken, dtype=torch.uint8)
            except RuntimeError as error:
                policy = self.executable.watermark
                if not out_of_memory(error) or policy is None or not policy.relieve(position):
                    raise


def limit_to(budget: int) -> None:
    """To what the process holds now, without what is free in its heap, and the budget and the slack."""
    CpuReading(0, 0).release()
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() - reusable_bytes() + budget + SLACK, most))


def rank_process(rank: int, run: Run, recompute: str, folder: str) -> None:
    """Exit code 3: an allocation failed for good."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (1 << 40, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    plan = plan_of(run.ranks, recompute, run.sequence)
    if run.ranks > 1:
        store = FileStore(os.path.join(folder, "store"), run.ranks)
        transport: Any = ProcessGroupTransport(plan, rank, store)
    else:
        transport = Loopback("cpu").transport(0)
    return_freed_memory()
    other = Other(run, rank in run.pressed)
    executable = Executable(plan, rank, transport, allocate(plan, rank), SyntheticSource(64, seed=1), delay=other)
    other.executable = executable
    drive(executable, 0)
    limit_to(run.budget)
    try:
        for step in range(STEPS):
            other.step = step
            drive(executable, step + 1)
    except (RuntimeError, MemoryError) as error:
        os._exit(3 if out_of_memory(error) else 4)
    except TitanError:
        os._exit(4)  # a peer died
    os._exit(0)


def outcome(run: Run, recompute: str) -> str:
    """ok, died (of memory on any rank), failed (of anything else) or hung."""
    context = processes.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=rank_process, args=(r, run, recompute, folder)) for r in range(run.ranks)]
        for process in ranks:
            process.start()
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and any(p.is_alive() for p in ranks) and not any(p.exitcode for p in ranks):
            time.sleep(0.005)
        codes = [p.exitcode for p in ranks]
        for process in ranks:
            process.kill()
            process.join()
    if 3 in codes:
        return "died"
    return "ok" if not any(codes) and None not in codes else "hung" if not any(codes) else "failed"


def overhead(rounds: int) -> tuple[list[float], int]:
    """Ratios of step times, adaptive to fixed, in turns in one process whose limit is far away; rebuilds done."""
    executables = {}
    for recompute in ("none", "adaptive"):
        plan = plan_of(1, recompute)
        source = SyntheticSource(64, seed=1)
        executables[recompute] = Executable(plan, 0, Loopback("cpu").transport(0), allocate(plan, 0), source)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + (4 << 30), before[1]))
    ratios = []
    for step in range(rounds + 2):
        order = ("none", "adaptive") if step % 2 else ("adaptive", "none")
        times = {}
        for recompute in order:
            start = time.process_time()
            drive(executables[recompute], step)
            times[recompute] = time.process_time() - start
        if step >= 2:
            ratios.append(times["adaptive"] / times["none"])
    resource.setrlimit(resource.RLIMIT_DATA, before)
    policy = executables["adaptive"].watermark
    assert policy is not None
    return ratios, sum(tier != TIERS[0] for tier in policy.expected.values())


def sweep_process(budget: int, queue: Any) -> None:
    torch.set_num_threads(1)
    return_freed_memory()
    plan = plan_of(1, "adaptive")
    executable = Executable(plan, 0, Loopback("cpu").transport(0), allocate(plan, 0), SyntheticSource(64, seed=1))
    drive(executable, 0)
    limit_to(budget)
    report = drive(executable, 1)
    policy = executable.watermark
    assert policy is not None and isinstance(policy.reading, CpuReading)
    again = sum(len(s.rebuild_body(tier)) for tier in policy.forecast.tiers.values() for s in plan.segments)
    queue.put((budget, again, report.peak_bytes))


def sweep(points: int) -> tuple[list[tuple[int, int, int]], bool]:
    least, most = peak("full"), peak("none")
    context = processes.get_context("fork")
    found: list[tuple[int, int, int]] = []
    for number in range(points):
        queue = context.SimpleQueue()
        budget = int((most + (least - most) * number / (points - 1)) / (HIGH if number == 0 else 1)) + 1
        process = context.Process(target=sweep_process, args=(budget, queue))
        process.start()
        process.join(PATIENCE)
        if process.exitcode != 0:
            return found, False
        found.append(queue.get())
    monotone = [calls for _, calls, _ in found] == sorted(calls for _, calls, _ in found)
    within = all(most_used <= budget for budget, _, most_used in found)
    return found, monotone and within and found[0][1] == 0 and refused(least)


def refused(least: int) -> bool:
    """A device that the plan's tensors with everything recomputed do not fit is refused when compiling."""
    spec = spec_of(1)
    whole = search(replace(spec, objective=spec.objective.model_copy(update={"memory_fraction": 1.0})))
    fixed = whole.ledger.peak - sum(whole.ledger.worst.components[k] for k in ("activations", "workspace"))
    fraction = (fixed + 0.97 * least) / spec.cluster.device.memory
    try:
        search(replace(spec, objective=spec.objective.model_copy(update={"memory_fraction": fraction})))
    except TitanError as error:
        return error.diagnostics[0].code == "T301"
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="12 runs in place of 200")
    parser.add_argument("--json", action="store_true", help="the result as one JSON object")
    parser.add_argument("--runs", type=int, help="how many runs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runs = arguments.runs or (12 if arguments.quick else 200)
    budget = int(max(peak("full") / 0.58, peak("full", LONG) / 0.88, peak("none") * 1.02))
    for ranks in (1, 2):
        for recompute in ("none", "adaptive", "full"):
            for sequence in (LENGTH, LONG):
                plan_of(ranks, recompute, sequence)
    pressures = [draw(n, budget).pressure for n in range(runs)]
    results = {kind: [outcome(draw(n, budget), kind) for n in range(runs)] for kind in ("none", "adaptive")}
    points, sweep_ok = sweep(5 if arguments.quick else 11)
    ratios, recomputes = overhead(12 if arguments.quick else 60)
    quartiles = statistics.quantiles(ratios, n=4)
    result = {
        "runs": runs,
        "pressures": {kind: pressures.count(kind) for kind in sorted(set(pressures))},
        "fixed_died": results["none"].count("died"),
        "adaptive_died": results["adaptive"].count("died"),
        "hangs": sum(found.count("hung") for found in results.values()),
        "failed_otherwise": sum(found.count("failed") for found in results.values()),
        "overhead_pct": 100 * (statistics.median(ratios) - 1),
        "overhead_interval_pct": [100 * (quartiles[0] - 1), 100 * (quartiles[2] - 1)],
        "recomputes_without_pressure": recomputes,
        "budget_sweep_ok": sweep_ok,
        "sweep": points,
        "budget_bytes": budget,
        "slack_bytes": SLACK,
        "peak_bytes": {tier: peak(tier) for tier in TIERS},
    }
    print(json.dumps(result) if arguments.json else "\n".join(f"{key:<28} {value}" for key, value in result.items()))
    wrong = result["adaptive_died"] or result["hangs"] or result["failed_otherwise"] or not sweep_ok
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
