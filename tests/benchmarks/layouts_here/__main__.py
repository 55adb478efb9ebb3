"""Predicted beside measured, on the machine at hand: step time and memory of layouts, and what the search chooses.

    python -m tests.benchmarks.layouts_here [--quick] [--json] [--profile machine.titan] [--rounds N] [--keep FILE]

The machine is profiled first (or was before: `--profile`), then every layout's steps are timed in interleaved rounds,
so that whatever slows the machine meets all alike; each time in processes of its own, as a run has them: what other
programs leave in the memory of a process slows its steps. With `--keep`, times are added to those in a file, so that it
can be done in parts: `--model llama --rounds 2`, once more, ..., `--rounds 0` to report.

Shared machines change their speed. Before the steps of every layout the same products of matrices are timed in its
processes (the yardstick), and before and after the profile: figures `at_profiled_speed` divide each time by what
the yardstick has become since, the others are as measured.

layouts                number of layouts of 2 and 4 ranks whose step was predicted and measured
median_abs_pct         median of |predicted - measured| / measured over them, in percent; measured: median of all steps
spearman               rank correlation of both orders
memory_median_abs_pct  the same of the most bytes of tensors alive on any rank in a step
chosen_within_5pct     of `cases`, how often what the search chose was the fastest measured that the case admits, or
                       within 5 % of it
halves                 odd rounds against even ones, as predicted against measured: what the machine's own noise leaves
drift_pct              how much longer the yardstick takes than at the profile, median (with `--profile` than in the
                       first part that is kept)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan.compiler.cost.simulate import simulate
from titan.compiler.plan.program import Plan
from titan.compiler.plan.sizes import memory_by_component
from titan.compiler.plan.text import print_plan
from titan.runtime.profile.pool import Pool

from tests.benchmarks.layouts_here import programs
from tests.benchmarks.layouts_here.cases import MODELS, Case, cases, layouts, plan_of

STEPS = 4  # of a layout that are timed in each round
WARM_UP = 1  # steps before them, after those that show the peak
NEAR = 0.05


@dataclass(slots=True)
class Row:
    """One plan with what is known of it; `scored`: one of the layouts, not only a choice of the search."""

    name: str
    plan: Plan
    scored: bool
    model: str
    key: str
    predicted: float = 0.0
    memory: int = 0
    peak: int = 0
    seconds: list[float] = field(default_factory=list)
    yardsticks: list[float] = field(default_factory=list)  # seconds, beside each of `seconds`

    @property
    def measured(self) -> float:
        return statistics.median(self.seconds)

    def half(self, odd: bool) -> float:
        """Seconds as measured in every other round."""
        return statistics.median(s for n, s in enumerate(self.seconds) if n // STEPS % 2 == odd)

    def steady(self, yardstick: float) -> float:
        """Seconds as measured, had the machine been as fast as when its yardstick took so many."""
        return statistics.median(s * yardstick / y for s, y in zip(self.seconds, self.yardsticks, strict=True))

    def record(self) -> dict[str, Any]:
        return {
            "layout": self.name,
            "scored": self.scored,
            "predicted_s": self.predicted,
            "measured_s": self.measured,
            "steps": len(self.seconds),
            "predicted_bytes": self.memory,
            "measured_bytes": self.peak,
        }


def row_of(name: str, plan: Plan, scored: bool, model: str) -> Row:
    memory = max(sum(memory_by_component(plan, role).values()) for role in plan.roles)
    return Row(name, plan, scored, model, identity(plan), predicted=simulate(plan).seconds, memory=memory)


def gather(profile: Path, models: tuple[str, ...]) -> tuple[list[Row], list[tuple[Case, Row]]]:
    """All plans, each once, and the row that the search chose in each case."""
    rows = [row_of(str(layout), plan_of(layout, profile), True, layout.model) for layout in layouts(models)]
    known = {row.key: row for row in rows}
    chosen = []
    for case in cases(models):
        plan = case.choose(profile)
        key = identity(plan)
        if key not in known:
            known[key] = row_of(
                f"chosen for {case.model} on {case.ranks}: {case.pins or 'free'}", plan, False, case.model
            )
            rows.append(known[key])
        chosen.append((case, known[key]))
    return rows, chosen


def identity(plan: Plan) -> str:
    """What is run, without reasons and pins."""
    lines = print_plan(plan).splitlines()
    body = "\n".join(line for line in lines if not line.startswith("set "))
    return hashlib.sha256(body.encode()).hexdigest()[:24]


def measure(rows: list[Row], rounds: int, keep: Path | None, yardstick: float) -> None:
    """Times and peaks of all rows; kept with the yardstick of the profile."""
    for _ in range(rounds):
        for row in rows:
            with Pool(row.plan.mesh.world_size) as pool:
                now = max(pool.call(programs.yardstick))
                peaks = pool.call(programs.load, row.plan, not row.peak)
                row.peak = row.peak or max(peaks)
                found = pool.call(programs.steps, WARM_UP + STEPS)
            row.seconds += [max(ranks) for ranks in zip(*found, strict=True)][WARM_UP:]
            row.yardsticks += STEPS * [now]
        if keep is not None:
            store(rows, keep, yardstick)


def kept(keep: Path | None) -> dict[str, Any]:
    return json.loads(keep.read_text()) if keep is not None and keep.exists() else {}


def store(rows: list[Row], keep: Path, yardstick: float) -> None:
    """The rows of this part beside those of others, by what is run."""
    records = {row.key: {"peak": row.peak, "seconds": row.seconds, "yardsticks": row.yardsticks} for row in rows}
    found = kept(keep) | {"yardstick": yardstick} | records
    partial = keep.with_name(f".{keep.name}")
    partial.write_text(json.dumps(found))
    partial.replace(keep)


def ranks_of(values: list[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    found = [0.0] * len(values)
    for place, k in enumerate(order):
        found[k] = float(place)
    return found


def agreement(some: list[float], others: list[float]) -> float:
    """Rank correlation."""
    return statistics.correlation(ranks_of(some), ranks_of(others))


def signed(predicted: list[float], measured: list[float]) -> dict[str, float]:
    """Errors in percent: the median of them without their signs, and with."""
    errors = [100 * (p / m - 1) for p, m in zip(predicted, measured, strict=True)]
    return {"median_abs_pct": statistics.median(map(abs, errors)), "bias_pct": statistics.median(errors)}


def report(rows: list[Row], chosen: list[tuple[Case, Row]], yardstick: float) -> dict[str, Any]:
    """`yardstick`: its seconds when the machine was profiled."""
    scored = [row for row in rows if row.scored]
    predicted = [row.predicted for row in scored]
    errors = [abs(row.predicted / row.measured - 1) for row in scored]
    memory = [abs(row.memory / row.peak - 1) for row in scored]
    halves = [[row.half(odd) for row in scored] for odd in (True, False)] if several(scored) else []
    verdicts = []
    for case, row in chosen:
        rivals = [r for r in rows if r.plan.mesh.world_size == case.ranks and r.model == case.model and admits(case, r)]
        best = min(rivals, key=lambda r: r.measured)
        verdicts.append(
            {
                "case": f"{case.model} on {case.ranks}: {case.pins or 'free'}".replace("\n", ", "),
                "chosen": row.name,
                "chosen_s": row.measured,
                "fastest": best.name,
                "fastest_s": best.measured,
                "rivals": len(rivals),
            }
        )
    return {
        "layouts": len(scored),
        **signed(predicted, [row.measured for row in scored]),
        "worst_abs_pct": 100 * max(errors),
        "spearman": agreement(predicted, [row.measured for row in scored]),
        "memory_median_abs_pct": 100 * statistics.median(memory),
        "cases": len(chosen),
        "chosen_within_5pct": sum(v["chosen_s"] <= (1 + NEAR) * v["fastest_s"] for v in verdicts),
        "halves": {**signed(*halves), "spearman": agreement(*halves)} if halves else None,
        "drift_pct": 100 * (statistics.median(y for row in scored for y in row.yardsticks) / yardstick - 1),
        "at_profiled_speed": signed(predicted, [row.steady(yardstick) for row in scored]),
        "rows": [row.record() for row in rows],
        "choices": verdicts,
    }


def several(rows: list[Row]) -> bool:
    """Whether all were timed in more than one round."""
    return all(len(row.seconds) > STEPS for row in rows)


def admits(case: Case, row: Row) -> bool:
    mesh = {name: row.plan.mesh.size(name) for name in ("pipeline", "data", "context", "tensor")}
    return all(mesh[key] in values for key, values in case.wanted.items())


def yardstick() -> float:
    with Pool(programs.YARDSTICKS) as pool:
        return max(pool.call(programs.yardstick))


def profiled(folder: Path) -> Path:
    output = folder / "machine.titan"
    subprocess.run(
        [sys.executable, "-m", "titan.compiler.cli", "profile", "-o", str(output), "--ranks", "4"], check=True
    )
    return output


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one model, ten cases, fewer rounds")
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    parser.add_argument("--profile", type=Path, help="a file that `titan profile` wrote on this machine")
    parser.add_argument("--rounds", type=int, help="interleaved rounds; 0: report what is kept")
    parser.add_argument("--keep", type=Path, help="file to which times are added, and from which they are reported")
    parser.add_argument("--model", choices=tuple(MODELS), help="only this model")
    given = parser.parse_args()
    models = (given.model,) if given.model else ("llama",) if given.quick else tuple(MODELS)
    earlier = kept(given.keep)
    with tempfile.TemporaryDirectory() as folder:
        before = yardstick()
        profile = given.profile or profiled(Path(folder))
        then = earlier.get("yardstick") or (before + yardstick()) / 2
        rows, chosen = gather(profile.absolute(), models)
    for row in rows:
        known = earlier.get(row.key, {})
        row.peak, row.seconds, row.yardsticks = (
            known.get(k, d) for k, d in (("peak", 0), ("seconds", []), ("yardsticks", []))
        )
    rounds = given.rounds if given.rounds is not None else 4 if given.quick else 6
    if rounds:
        measure(rows, rounds, given.keep, then)
    unmeasured = [row.name for row in rows if not row.seconds]
    rows, chosen = [r for r in rows if r.seconds], [(c, r) for c, r in chosen if r.seconds]
    if len(rows) < 2:
        sys.exit("nothing is measured yet: give --rounds")
    found = {**report(rows, chosen, then), "unmeasured": unmeasured}
    for row in found["rows"]:
        print(
            f"{row['layout'][:70]:70} {1e3 * row['measured_s']:8.1f} ms, {1e3 * row['predicted_s']:8.1f} predicted"
            f" {100 * (row['predicted_s'] / row['measured_s'] - 1):+6.1f}%  memory"
            f" {100 * (row['predicted_bytes'] / row['measured_bytes'] - 1):+5.1f}%",
            file=sys.stderr,
        )
    for choice in found["choices"]:
        print(
            f"{choice['case']}: {choice['chosen_s'] / choice['fastest_s']:.3f} of {choice['fastest']}", file=sys.stderr
        )
    print(
        json.dumps(found)
        if given.json
        else json.dumps({k: v for k, v in found.items() if k not in ("rows", "choices")})
    )


if __name__ == "__main__":
    main()
