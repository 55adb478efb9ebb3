"""Errors of predictions: per source and overall, and how honest they are (each source with figures from the others)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from titan.compiler.cost.memory import verdict

from tests.benchmarks.published_runs.predict import Predicted
from tests.benchmarks.published_runs.rows import Row
from tests.benchmarks.published_runs.software import FIGURES


@dataclass(frozen=True)
class Compared:
    """A row beside its prediction."""

    row: Row
    predicted: Predicted

    @property
    def time_error(self) -> float | None:
        measured = self.row.step_time
        return self.predicted.seconds / measured - 1 if measured else None

    @property
    def memory_error(self) -> float | None:
        """Against tensors where the source counts these, else against all that a device holds."""
        measured = self.row.memory
        return self.predicted.held(self.row.text("mem_kind")) / measured - 1 if measured else None

    @property
    def verdict(self) -> str:
        return self.verdict_with(FIGURES["fragments"])

    def verdict_with(self, fragments: float) -> str:
        """The verdict where this share of tensors is what the allocator loses at most."""
        more = round(self.predicted.tensors * (fragments - FIGURES["fragments"]))
        return verdict(self.predicted.point, self.predicted.upper + more, self.predicted.device)


def quantile(values: Sequence[float], share: float) -> float:
    """Linear between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def errors(found: Iterable[tuple[str, float]]) -> dict[str, Any]:
    """`found`: (source, relative error)."""
    by_source: dict[str, list[float]] = defaultdict(list)
    for source, error in found:
        by_source[source].append(error)
    everything = [error for listed in by_source.values() for error in listed]
    return {**_errors(everything), "by_source": {name: _errors(listed) for name, listed in sorted(by_source.items())}}


def _errors(listed: list[float]) -> dict[str, Any]:
    if not listed:
        return {"rows": 0, "median_abs_pct": None, "mean_abs_pct": None, "p90_abs_pct": None, "bias_pct": None}
    sizes = [abs(e) for e in listed]
    return {
        "rows": len(listed),
        "median_abs_pct": round(100 * median(sizes), 2),
        "mean_abs_pct": round(100 * mean(sizes), 2),
        "p90_abs_pct": round(100 * quantile(sizes, 0.9), 2),
        "bias_pct": round(100 * mean(listed), 2),
    }


def headline(row: Row) -> bool:
    """Rows that are complete and trustworthy, in 16 bits."""
    return row.priority == "1" and not row.eight_bit


def times(compared: Sequence[Compared], only_headline: bool = True) -> dict[str, Any]:
    chosen = [c for c in compared if c.time_error is not None and (headline(c.row) or not only_headline)]
    worst = sorted(chosen, key=lambda c: -abs(c.time_error or 0.0))[:10]
    listed = [
        {"row": c.row.key, "measured_s": round(c.row.step_time or 0.0, 4), "predicted_s": round(c.predicted.seconds, 4),
         "error_pct": round(100 * (c.time_error or 0.0), 1)}
        for c in worst
    ]  # fmt: skip
    return {**errors((c.row.source, c.time_error or 0.0) for c in chosen), "worst": listed}


def groups(compared: Sequence[Compared]) -> dict[str, dict[str, Any]]:
    """Step times of rows of any priority that share a mechanism: a context split over ranks, experts, 8 bits."""
    timed = [c for c in compared if c.time_error is not None]
    kinds: dict[str, Callable[[Row], bool]] = {
        "context > 1": lambda row: row.number("cp", 1) > 1,
        "experts": lambda row: row.number("num_experts") > 0,
        "8 bits": lambda row: row.eight_bit,
    }
    return {name: errors((c.row.source, c.time_error or 0.0) for c in timed if of(c.row)) for name, of in kinds.items()}


def memories(compared: Sequence[Compared], only_headline: bool = True) -> dict[str, Any]:
    chosen = [c for c in compared if c.memory_error is not None and (c.row.priority == "1" or not only_headline)]
    return errors((c.row.source, c.memory_error or 0.0) for c in chosen)


def not_measured(compared: Sequence[Compared]) -> dict[str, int]:
    """Runs that are planned and priced and of which the table has nothing to compare that with."""
    return {
        "step_time": sum(c.time_error is None for c in compared),
        "memory": sum(c.memory_error is None for c in compared),
    }


def fits(successful: Sequence[Compared], failed: Sequence[Compared]) -> dict[str, Any]:
    """How often the verdict is right for runs that ran out of memory and for runs that did not."""

    def share(compared: Sequence[Compared], word: str) -> float | None:
        return round(100 * mean(c.verdict == word for c in compared), 2) if compared else None

    return {
        "oom_rows": len(failed),
        "oom_called_fits_pct": share(failed, "fits"),
        "oom_called_at_risk_pct": share(failed, "at risk"),
        "oom_called_fits_held_out_pct": held_out(failed),
        "ok_rows": len(successful),
        "ok_called_not_fit_pct": share(successful, "does not fit"),
    }


BOUNDS = tuple(step / 100 for step in range(31))  # of the share that an allocator loses
WRONG = 0.05  # of the runs that ran out of memory may be called `fits`


def held_out(failed: Sequence[Compared]) -> float | None:
    """Percent called `fits` where the allocator's bound is the least that is right for every second model of every
    source, of the other models; both ways."""
    models = sorted({(c.row.source, c.row.text("model_name")) for c in failed})
    halves = [[c for c in failed if (c.row.source, c.row.text("model_name")) in models[start::2]] for start in (0, 1)]
    if not all(halves):
        return None
    wrong = 0
    for own, others in (halves, halves[::-1]):
        enough = [b for b in BOUNDS if mean(c.verdict_with(b) == "fits" for c in own) <= WRONG]
        wrong += sum(c.verdict_with(min(enough, default=BOUNDS[-1])) == "fits" for c in others)
    return round(100 * wrong / len(failed), 2)


SECTIONS = ("step_time", "step_time_all_rows", "leave_one_out", "memory", "memory_all_rows")
COLUMNS = ("rows", "median_abs_pct", "mean_abs_pct", "p90_abs_pct", "bias_pct")


def table(report: dict[str, Any]) -> str:
    """The report for people: a line per source and section, the worst rows, verdicts, and what was left out."""
    lines = [f"{'':28s}" + "".join(f"{name.removesuffix('_pct'):>14s}" for name in COLUMNS)]
    for section, found in (*((s, report[s]) for s in SECTIONS), *report["groups"].items()):
        if found is None:
            lines.append(f"{section}: needs scipy")
            continue
        for name, one in ((section, found), *((f"  {s}", e) for s, e in found["by_source"].items())):
            lines.append(f"{name:28s}" + "".join(f"{one[c] if one[c] is not None else '-':>14}" for c in COLUMNS))
    for worst in report["step_time"]["worst"]:
        lines.append(f"worst: {worst['row']}: {worst['measured_s']} s, {worst['error_pct']:+}%")
    lines += [f"fits: {name} = {value}" for name, value in report["fits"].items()]
    lines += [f"not measured: {name} of {count} runs" for name, count in report["not_measured"].items()]
    lines += [f"left out: {count} x {reason}" for reason, count in report["skipped"].items()]
    return "\n".join(lines)
