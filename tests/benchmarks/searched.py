"""Whether the search finds plans at least as good as those that people published.

For every run of the table that we can plan: the published layout as a plan, and where that fits, the plan that the
search chooses for the same model, batch, machine and memory. Both are compiled and simulated, and both must fit.

    python -m tests.benchmarks.searched --json [--quick] [--runs FILE] [--part 1/4]

Keys: `rows` of the table, `compared`, `at_least_as_fast`, `worse` (each with both times and layouts), `median_gain_pct`
by which the search is faster, `skipped` {reason: count}, `seconds`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from titan.compiler.cost.machine import read_machine
from titan.compiler.cost.memory import memory_ledger
from titan.compiler.cost.simulate import simulate
from titan.compiler.lower import lower
from titan.compiler.search.refuse import describe
from titan.compiler.search.search import SearchResult, search
from titan.compiler.spec.legality import legal
from titan.compiler.spec.schema import Parallel, Spec
from titan.compiler.strategy import Strategy
from titan.grammar.diagnostics import TitanError

from tests.benchmarks.published_runs.layout import Refused, planned
from tests.benchmarks.published_runs.rows import FIXTURES, Row, skipped, table_of

QUICK = 40  # runs of the sample
CALLS = 12_000  # block calls of the largest published plan that is simulated whole
EQUAL = 1 + 1e-9
TIERS = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class Compared:
    """Seconds of the published layout and of the searched plan, and what they are."""

    row: str
    published: float
    searched: float
    layout: str
    plan: str

    @property
    def good(self) -> bool:
        return self.searched <= EQUAL * self.published


class Skip(Exception):
    """A run that cannot be compared; the text says why."""


def published(row: Row) -> tuple[Spec, Strategy]:
    """Spec and layout of a run, with the recompute that was used. Raises Skip."""
    reason = skipped(row)
    if reason:
        raise Skip(reason)
    try:
        spec, strategy = planned(row)
    except Refused as refused:
        raise Skip(str(refused)) from None
    spec = replace(spec, parallel=Parallel())
    tier = row.text("recompute")
    strategy = replace(strategy, recompute=tier if tier in TIERS else "none")
    if strategy.world_size != spec.cluster.world_size:
        raise Skip("devices that do no work")
    broken = legal(spec, strategy)
    if broken:
        raise Skip(f"{broken[0].code}: {broken[0].message.partition(';')[0][:60]}")
    if 2 * strategy.pipeline * strategy.micro_batches * strategy.chunks > CALLS:
        raise Skip(f"more than {CALLS:,} block calls")
    return spec, strategy


def compare(row: Row, known: dict[str, SearchResult | None]) -> Compared:
    """Raises Skip where the published layout does not fit."""
    spec, strategy = published(row)
    machine = read_machine(spec.cluster.model_dump())
    plan = lower(spec, strategy)
    if memory_ledger(plan, machine).verdict != "fits":
        raise Skip("the published layout is not called `fits`")
    seconds = simulate(plan, machine).seconds
    key = repr((spec.model, spec.cluster, spec.train))
    if key not in known:
        try:
            known[key] = search(spec)
        except TitanError:
            known[key] = None
    found = known[key]
    if found is None or found.ledger.verdict != "fits":
        return Compared(row.key, seconds, float("inf"), describe(strategy), "nothing that fits")
    return Compared(row.key, seconds, found.timeline.seconds, describe(strategy), describe(found.strategy))


def compared(rows: list[Row], why: Counter[str]) -> Iterator[Compared]:
    known: dict[str, SearchResult | None] = {}
    for row in rows:
        try:
            yield compare(row, known)
        except Skip as skip:
            why[str(skip)] += 1


def sample(rows: list[Row], number: int) -> list[Row]:
    """Runs that can be compared, spread evenly over the table."""
    usable = []
    for row in rows:
        try:
            published(row)
        except Skip:
            continue
        usable.append(row)
    step = max(len(usable) // number, 1)
    return usable[::step][:number]


def part_of(text: str) -> tuple[int, int]:
    """(part, parts) of `1/4`. Raises ArgumentTypeError."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text} is no part of a table: 1/4 is the first of four")
    return int(found[1]), int(found[2])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.searched", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="a sample of the runs")
    parser.add_argument("--runs", type=table_of, default=str(FIXTURES / "published_runs.csv"), metavar="FILE")
    parser.add_argument("--part", type=part_of, default="1/1", help="which of how many parts of the table, as 1/4")
    given = parser.parse_args(arguments)
    part, parts = given.part
    started, rows, why = time.perf_counter(), given.runs, Counter[str]()
    chosen = (sample(rows, QUICK) if given.quick else rows)[part - 1 :: parts]
    found = []
    for one in compared(chosen, why):
        found.append(one)
        if not one.good:
            print(f"{one.row}: {one.searched:.4g} s searched, {one.published:.4g} s published", file=sys.stderr)
            print(f"  searched  {one.plan}\n  published {one.layout}", file=sys.stderr)
    result = report(len(rows), found, why, time.perf_counter() - started)
    print(json.dumps(result) if given.json else json.dumps(result, indent=2))
    return 0 if all(one.good for one in found) else 1


def report(rows: int, found: list[Compared], why: Counter[str], seconds: float) -> dict[str, Any]:
    gains = [100 * (one.published / one.searched - 1) for one in found]
    worse = [one for one in found if not one.good]
    return {
        "rows": rows,
        "compared": len(found),
        "at_least_as_fast": len(found) - len(worse),
        "worse": [
            {
                "row": one.row,
                "published_s": one.published,
                "searched_s": None if one.searched == float("inf") else one.searched,
                "layout": one.layout,
                "plan": one.plan,
            }
            for one in worse
        ],
        "median_gain_pct": median(gains) if gains else None,
        "skipped": dict(why.most_common()),
        "seconds": seconds,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
