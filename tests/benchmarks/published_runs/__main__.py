"""Published runs beside their predictions: `python -m tests.benchmarks.published_runs [--runs FILE] [--oom FILE]
[--quick] [--json]`.

Every fully specified row is planned with its published layout, its plan simulated, and step time, memory and the
verdict on memory compared. What is left out is counted by reason, and so are rows of which a measurement is missing
(`not_measured`). Rows that say themselves that they ran out of memory count as such in either file. `leave_one_out` are
the errors of each source when the shared figures are fitted to the other sources alone (`fit`: one step of it, on the
rows that it uses).
"""

from __future__ import annotations

import argparse
import gc
import json
from collections import Counter
from collections.abc import Sequence
from multiprocessing import get_context

import numpy as np

from tests.benchmarks.published_runs.layout import Refused
from tests.benchmarks.published_runs.parameters import current
from tests.benchmarks.published_runs.predict import predict
from tests.benchmarks.published_runs.rows import FIXTURES, Row, skipped, table_of
from tests.benchmarks.published_runs.score import Compared, errors, fits, groups, memories, not_measured, table, times

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
    except Exception as error:  # of a table that nobody has seen one row must not end the others
        return f"failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"


def compare_all(runs: Sequence[Row], ooms: Sequence[Row]) -> list[tuple[bool, Compared | str]]:
    """Whether it ran out of memory and what `compare` finds, of each row; a row that is there again is only counted."""
    jobs = [(row, row.ran_out) for row in runs] + [(row, True) for row in ooms]
    first = list({(tuple(row.cells.items()), ran_out): (row, ran_out) for row, ran_out in jobs}.values())
    with get_context("fork").Pool(2) as pool:
        found = pool.map(compare, first, chunksize=8)
    again = ["the same row twice"] * (len(jobs) - len(first))
    return [*((ran_out, one) for (_, ran_out), one in zip(first, found)), *((False, reason) for reason in again)]


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
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.published_runs", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--runs", type=table_of, default=str(FIXTURES / "published_runs.csv"), metavar="FILE")
    parser.add_argument("--oom", type=table_of, default=str(FIXTURES / "published_runs_oom.csv"), metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="every sixth row")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    step = QUICK if options.quick else 1
    gc.disable()
    results = compare_all(options.runs[::step], options.oom[::step])
    successful = [r for ran_out, r in results if isinstance(r, Compared) and not ran_out]
    failed = [r for ran_out, r in results if isinstance(r, Compared) and ran_out]
    report = {
        "step_time": times(successful),
        "step_time_all_rows": times(successful, only_headline=False),
        "groups": groups(successful),
        "leave_one_out": leave_one_out([c.row for c in successful]),
        "memory": memories(successful),
        "memory_all_rows": memories(successful, only_headline=False),
        "fits": fits(successful, failed),
        "not_measured": not_measured(successful),
        "skipped": dict(Counter(r for _, r in results if isinstance(r, str)).most_common()),
    }
    print(json.dumps(report) if options.json else table(report))


if __name__ == "__main__":
    main()
