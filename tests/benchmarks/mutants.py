"""How many broken plans the verifier refuses: `python -m tests.benchmarks.mutants [--quick] --json`.

Plans of several layouts are broken in one place each, in many ways. A mutant is *killable* when running it, all ranks
in one process and in float64, hangs, fails, or changes a loss, the norm, a gradient or a parameter: then the verifier
must refuse it and name the instruction (or, where the header is broken, what it declares). A mutant that changes
nothing may be refused too: leaving out a `free` breaks a rule, not a result.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from titan.compiler.plan.program import Plan
from titan.compiler.verify.proofs import verify
from titan.runtime.data import SyntheticSource
from titan.runtime.loopback import run_loopback

from tests.benchmarks import mutation_headers, mutation_values  # noqa: F401  (their operators join the table)
from tests.benchmarks.mutation import OPERATORS, Mutant, mutants
from tests.compiler.verify.tiny import KINDS, plan

PLANS = ("zero", "kv", "tied", "heads", "ring", "square", "sequence", "split", "pairs", "away")
TOLERANCE = 1e-9
LONGEST = 60  # seconds that a broken plan may run
_HEADER = set(vars(mutation_headers))
Numbers = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant. `named`: the first finding names an instruction, or the header entry at fault."""

    plan: str
    operator: str
    where: str
    killable: bool
    refused: bool
    named: bool
    difference: str
    finding: str


def execute(found: Plan) -> Numbers:
    """Everything that two training steps and an evaluation compute."""
    torch.set_num_threads(1)
    source = SyntheticSource(vocabulary=int(found.setting("model")["vocab"]), seed=3, ignore_fraction=0.2)
    trained = run_loopback(found, 2, source, keep_gradients=True)
    numbers: Numbers = {}
    for step, gradients in enumerate(trained.gradients):
        numbers |= {f"gradient {step} {name}": g for name, g in gradients.items()}
    evaluated = run_loopback(found, 1, source, "evaluate", states=trained.states, first_step=2)
    for run, result in (("train", trained), ("evaluate", evaluated)):
        for step, reports in enumerate(result.reports):
            for rank, report in enumerate(reports):
                values = [float("nan") if v is None else v for v in (report.loss, report.grad_norm)]
                numbers[f"{run} {step} rank {rank}"] = torch.tensor(values, dtype=torch.float64)
    for state in trained.states:
        numbers |= {f"rank {state.rank} {name}": p.double() for name, p in state.parameters.items()}
    return numbers


def difference(expected: Numbers, found: Plan) -> str:
    """What executing a mutant shows: "" when nothing."""
    try:
        numbers = execute(found)
    except Exception as problem:  # whatever breaks, breaks the run
        return f"{type(problem).__name__}: {str(problem)[:100]}"
    if numbers.keys() != expected.keys():
        return "other parameters"
    for name, value in expected.items():
        if value.shape != numbers[name].shape or not torch.allclose(
            value, numbers[name], rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True
        ):
            return f"{name} differs"
    return ""


def isolated(expected: Numbers, found: Plan) -> str:
    """`difference` in a process of its own: a broken plan may crash the operators' kernels or never end."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        signal.alarm(LONGEST)
        with os.fdopen(writing, "wb") as stream:
            stream.write(difference(expected, found).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        shown = stream.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return shown if status == 0 else f"ended with status {status}"


def judge(name: str, expected: Numbers, mutant: Mutant) -> Verdict:
    """Verifies and executes one mutant."""
    broken = mutant.make()
    findings = [f for proof in verify(broken).values() for f in proof.findings]
    shown = isolated(expected, broken)
    header = mutant.operator in _HEADER
    named = bool(findings) and any(f.index >= 0 or (header and f.message) for f in findings)
    text = str(findings[0]) if findings else ""
    return Verdict(name, mutant.operator, mutant.where, bool(shown), bool(findings), named, shown, text)


def sample(name: str, each: int, seed: int = 1) -> list[Mutant]:
    """Up to `each` mutants per operator of one plan, spread over its places by a fixed draw."""
    found: list[Mutant] = []
    for operator in OPERATORS:
        every = mutants(plan(name), operator)
        found += random.Random(f"{seed} {name} {operator}").sample(every, min(each, len(every)))
    return found


def judge_all(name: str, each: int) -> list[Verdict]:
    expected = execute(plan(name))
    return [judge(name, expected, mutant) for mutant in sample(name, each)]


def report(verdicts: Iterable[Verdict], seconds: float) -> dict[str, object]:
    """The object that is printed. `refused` counts killable mutants that were refused with a name."""
    table: dict[str, dict[str, int]] = {}
    listed = list(verdicts)
    for v in listed:
        row = table.setdefault(v.operator, {"mutants": 0, "killable": 0, "refused": 0})
        row["mutants"] += 1
        row["killable"] += v.killable
        row["refused"] += v.killable and v.refused and v.named
    return {
        "mutants": len(listed),
        "killable": sum(v.killable for v in listed),
        "refused": sum(v.killable and v.refused and v.named for v in listed),
        "refused_without_difference": sum(v.refused and not v.killable for v in listed),
        "missed": [f"{v.plan} {v.operator} {v.where}: {v.difference}" for v in listed if v.killable and not v.refused],
        "unnamed": [
            f"{v.plan} {v.operator} {v.where}: {v.finding}" for v in listed if v.killable and v.refused and not v.named
        ],
        "plans": {name: KINDS[name][-1] for name in PLANS},
        "by_operator": dict(sorted(table.items())),
        "seconds": round(seconds, 1),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer mutants of each kind")
    parser.add_argument("--json", action="store_true", help="print one object")
    chosen = parser.parse_args(arguments)
    start = time.perf_counter()
    each = 2 if chosen.quick else 10
    with ProcessPoolExecutor(max_workers=2) as pool:
        verdicts = [v for found in pool.map(judge_all, PLANS, [each] * len(PLANS)) for v in found]
    found = report(verdicts, time.perf_counter() - start)
    if chosen.json:
        print(json.dumps(found))
    else:
        for key in ("mutants", "killable", "refused", "missed"):
            print(f"{key:<10} {found[key]}", file=sys.stderr)
    return 0 if found["killable"] == found["refused"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
