"""Published runs beside their predictions: `python -m tests.benchmarks.published_runs [--runs FILE] [--oom FILE]
[--quick] [--json]`.

Every fully specified row is planned with its published layout, its plan simulated, and step time, memory and the
verdict on memory compared. What is left out is counted by reason. `leave_one_out` are the errors of each source when
the shared figures are fitted to the other sources alone (`fit`: one step of it, on the rows that it uses).
"""

from __future__ import annotations

import argparse
import gc
import json
from collections import Counter
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from tests.benchmarks.published_runs.layout import Refused
from tests.benchmarks.published_runs.parameters import current
from tests.benchmarks.published_runs.predict import predict
from tests.benchmarks.published_runs.rows import FIXTURES, Row, read, skipped
from tests.benchmarks.published_runs.score import Compared, errors, fits, groups, memories, table, times

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


def leave_one_out(runs: Sequence[Row]) -> dict[str, object] | None:
    """Errors of each source with the figures fitted anew without it; None where SciPy is missing."""
    try:
        from tests.benchmarks.published_runs import fit
    except ImportError:
        return None
    fit.prepare_all(fit.fitted_rows(runs))
    with get_context("fork").Pool(2) as pool:
        return errors(fit.without_each(fit.linearised(pool, np.array(current()))))


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
        "groups": groups(successful),
        "leave_one_out": leave_one_out(runs),
        "memory": memories(successful),
        "memory_all_rows": memories(successful, only_headline=False),
        "fits": fits(successful, failed),
        "skipped": dict(Counter(r for r in results if isinstance(r, str)).most_common()),
    }
    print(json.dumps(report) if options.json else table(report))


if __name__ == "__main__":
    main()
