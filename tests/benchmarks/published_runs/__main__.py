"""Published runs beside their predictions: `python -m tests.benchmarks.published_runs [--runs FILE] [--oom FILE]
[--quick] [--json]`.

Every fully specified row is planned with its published layout, its plan simulated, and step time, memory and the
verdict on memory compared. What is left out is counted by reason. `leave_one_out` are the errors of each source with
the shared constants that the other sources alone would give (one rate of products, as that is what they disagree on).
"""

from __future__ import annotations

import argparse
import gc
import json
from collections import Counter
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from tests.benchmarks.published_runs.layout import Refused
from tests.benchmarks.published_runs.predict import predict
from tests.benchmarks.published_runs.rows import FIXTURES, Row, read, skipped
from tests.benchmarks.published_runs.score import Compared, errors, fits, headline, memories, times

QUICK = 6  # every so many rows


def compare(job: tuple[Row, bool]) -> Compared | str:
    """A row beside its prediction, or why not."""
    row, memory_only = job
    reason = skipped(row)
    if reason:
        return reason
    try:
        return Compared(row, predict(row, memory_only=memory_only))
    except Refused as refused:
        return str(refused)


def leave_one_out(compared: Sequence[Compared]) -> dict[str, object]:
    """Errors of each source, scaled by what the other sources of its device say about all predictions for it."""
    found: list[tuple[str, float]] = []
    chosen = [c for c in compared if headline(c.row) and c.time_error is not None]
    for c in chosen:
        device = c.row.text("gpu")[:4]
        others = [
            o.time_error or 0.0 for o in chosen if o.row.source != c.row.source and o.row.text("gpu")[:4] == device
        ]
        scale = 1 + median(others) if len(others) >= 5 else 1.0
        found.append((c.row.source, (1 + (c.time_error or 0.0)) / scale - 1))
    return errors(found)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.published_runs", description=__doc__)
    parser.add_argument("--runs", type=Path, default=FIXTURES / "published_runs.csv")
    parser.add_argument("--oom", type=Path, default=FIXTURES / "published_runs_oom.csv")
    parser.add_argument("--quick", action="store_true", help="every sixth row")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    runs, ooms = read(options.runs), read(options.oom)
    if options.quick:
        runs, ooms = runs[::QUICK], ooms[::QUICK]
    gc.disable()
    jobs = [(row, False) for row in runs] + [(row, True) for row in ooms]
    with get_context("fork").Pool(2) as pool:
        results = pool.map(compare, jobs, chunksize=8)
    successful = [r for r in results[: len(runs)] if isinstance(r, Compared)]
    failed = [r for r in results[len(runs) :] if isinstance(r, Compared)]
    report = {
        "step_time": times(successful),
        "step_time_all_rows": times(successful, only_headline=False),
        "leave_one_out": leave_one_out(successful),
        "memory": memories(successful),
        "memory_all_rows": memories(successful, only_headline=False),
        "fits": fits(successful, failed),
        "skipped": dict(Counter(r for r in results if isinstance(r, str)).most_common()),
    }
    print(json.dumps(report, indent=None if options.json else 1))


if __name__ == "__main__":
    main()
