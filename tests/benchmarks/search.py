"""Does the search find the optimum? `python -m tests.benchmarks.search [--quick] [--json] [--problems N] [--seed S]`.

Random small problems (devices, layers, batch, model, memory, wishes) of which every legal plan is compiled and
simulated: each mesh, form, micro-batch, schedule, way to shard, tier of recompute, with and without sequence
parallelism. Layers are split as for any plan. The search is the optimum where nothing that fits is faster.

problems      random problems that have a plan (500; --quick: 25); `plans`: simulated for them
optimal_pct   of them, those whose searched plan is the fastest; `within_1pct`: the same to 1%
refused       problems without a plan that fits, which the search refuses too; `wrongly_refused`: those it should not
worst         the largest excess of a searched plan, in percent, with the problem; null where none has a searched plan
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from titan.compiler.cost.memory import memory_ledger
from titan.compiler.cost.simulate import simulate
from titan.compiler.lower import lower
from titan.compiler.search.candidates import Candidate
from titan.compiler.search.enumeration import enumerate_space
from titan.compiler.search.orders import finished
from titan.compiler.search.search import estimator_of, memory_limit, search
from titan.compiler.search.space import allowed, schedules, shardings
from titan.compiler.spec.legality import is_legal
from titan.compiler.spec.resolve import load_spec
from titan.compiler.spec.schema import Spec
from titan.compiler.strategy import Strategy
from titan.grammar.diagnostics import TitanError

PROBLEMS, QUICK = 500, 25
EQUAL = 1 + 1e-9
NEAR = 1.01
MOST = 400  # plans of a problem; larger ones are drawn again
TEXT = """import clusters.nvidia

model {{
    vocab = 8000
    hidden = {hidden}
    max_positions = 4096
    attention = gqa {{ heads = 8, kv_heads = {kv_heads} }}
    layers = {layers} * dense {{ ffn = {ffn} }}
    rope = {{ theta = 10000 }}
}}
cluster = nvidia.dgx_h100 with {{ nodes = {nodes}, devices_per_node = {devices} }}
train {{
    sequence = {sequence}
    global_batch = {batch}
    precision = bf16
    optimizer = adamw {{ learning_rate = 3e-4 }}
    data = tokens("corpus.tokens")
}}
parallel {{
    {wishes}
}}
minimize step_time subject to memory <= {memory}% of device
"""
WISHES = {
    "schedule": ("in [one_f_one_b, gpipe]", "in [one_f_one_b, zero_bubble_h1]", "= interleaved", "= one_f_one_b"),
    "context": ("= 1", "<= 2"),
    "recompute": ("= none", "= full", "= selective"),
    "zero": ("<= 1", "= 2", "= 3"),
    "micro_batch": ("= 1", "<= 2"),
    "tensor": ("= 1", "<= 2"),
}


@dataclass(frozen=True)
class Outcome:
    """Nanoseconds of the fastest of all plans that fit and of the searched one; None where there is none."""

    plans: int
    best: int | None
    found: int | None

    @property
    def excess(self) -> float:
        """Of the searched step over the best, as a share."""
        assert self.best is not None and self.found is not None
        return self.found / self.best - 1


def problem(random_: random.Random) -> dict[str, Any]:
    """Numbers of a spec."""
    devices = random_.choice([2, 3, 4, 4, 6])
    wishes = {key: random_.choice(values) for key, values in WISHES.items() if random_.random() < 0.5}
    wishes.setdefault("schedule", random_.choice(WISHES["schedule"]))
    return {
        "hidden": random_.choice([512, 1024, 2048]), "kv_heads": random_.choice([2, 8]), "ffn": 1536 * devices,
        "layers": random_.choice([2, 3, 4, 5]), "nodes": random_.choice([1, 1, 2]) if devices == 2 else 1,
        "devices": devices, "sequence": random_.choice([1536, 3072]), "batch": random_.choice([2, 4, 6, 8]),
        "memory": random_.choice([4, 5, 6, 8, 92]), "wishes": "\n    ".join(f"{k} {v}" for k, v in wishes.items()),
    }  # fmt: skip


def read(numbers: dict[str, Any]) -> Spec:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.titan"
        path.write_text(TEXT.format(**numbers))
        return load_spec(path)


def every(spec: Spec) -> Iterator[Strategy]:
    """Every legal strategy, stages not yet known. Choices that stand for others in the space are taken apart."""
    for s in enumerate_space(spec).candidates:
        parallels = allowed(spec, "sequence_parallel", idle=s.tensor == 1)
        plain = ({"zero": 0},) if spec.parallel.zero.allows(0) else ()
        changes = (*plain, *shardings(spec, s))
        orders = schedules(spec, s.pipeline, s.micro_batches)
        for parallel, change, (name, chunks), tier in product(parallels, changes, orders, allowed(spec, "recompute")):
            found = replace(
                s, **change, sequence_parallel=parallel, schedule=name, wished_chunks=chunks, recompute=tier
            )
            if is_legal(spec, found):
                yield found


def solve(spec: Spec, most: int = MOST) -> Outcome | None:
    """Everything simulated beside the search; None where that is more than `most` plans."""
    estimator, limit = estimator_of(spec), memory_limit(spec)
    strategies = list(dict.fromkeys(every(spec)))
    if len(strategies) > most:
        return None
    try:
        found = search(spec, risk=False).timeline.step
    except TitanError:
        found = None
    best = found
    for s in strategies:
        strategy = finished(Candidate(s, estimator.estimate(s)), estimator, limit)
        plan = lower(spec, strategy)
        step = simulate(plan, estimator.machine).step
        if best is None or step < best:  # what is slower need not be measured
            best = step if memory_ledger(plan, estimator.machine, limit).verdict == "fits" else best
    return Outcome(len(strategies), best, found)


def benchmark(number: int, seed: int) -> dict[str, Any]:
    random_ = random.Random(seed)
    outcomes: list[tuple[dict[str, Any], Outcome]] = []
    refused = 0
    while len(outcomes) < number:
        numbers = problem(random_)
        try:
            outcome = solve(read(numbers))
        except TitanError:  # wishes that no layout keeps
            continue
        if outcome is not None and outcome.best is None and outcome.found is None:
            refused += 1
        elif outcome is not None and outcome.best is not None:
            outcomes.append((numbers, outcome))
    solved = [(numbers, o) for numbers, o in outcomes if o.found is not None]
    worst = max(solved, key=lambda row: row[1].excess, default=None)
    return {
        "problems": len(outcomes),
        "plans": sum(o.plans for _, o in outcomes),
        "optimal_pct": 100 * sum(o.excess <= EQUAL - 1 for _, o in solved) / len(outcomes),
        "within_1pct": 100 * sum(o.excess <= NEAR - 1 for _, o in solved) / len(outcomes),
        "refused": refused,
        "wrongly_refused": len(outcomes) - len(solved),
        "worst": None if worst is None else {"excess_pct": 100 * worst[1].excess, "problem": worst[0]},
    }


def at_least_one(text: str) -> int:
    """Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of problems: at least 1")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.search", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--problems", type=at_least_one)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found = benchmark(given.problems or (QUICK if given.quick else PROBLEMS), given.seed)
    if given.json:
        print(json.dumps(found, indent=2))
        return
    for key, value in found.items():
        print(f"{key:16} {value}")


if __name__ == "__main__":
    main()
