"""Equivalence over the grid: `python -m tests.benchmarks.equivalence [--quick | --all] [--part I/N] [--json]`.

Loopback, one process and plain autograd in float64 must agree on loss, every gradient, norm and updated parameters to
1e-9 over two steps. By default: every mesh of up to 16 ranks, every switch of the strategy, the kinds of models taking
turns; `--all` crosses those too; `--quick` is the pairwise sample of the tests. `--part` does the I-th of N shares.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from itertools import islice

import torch
from titan.grammar.diagnostics import TitanError

from tests.equivalence.comparison import TOLERANCE, mismatches
from tests.equivalence.configurations import RANKS, Configuration, cells, grid, meshes, pairwise

QUICK_SECONDS = 150.0  # a quick run ends within three minutes whatever the machine; it says how many it did


def rotated() -> Iterator[Configuration]:
    """Every mesh with every strategy; families, tied heads and odd vocabularies take turns from cell to cell."""
    turn = 0
    for mesh in meshes(tuple(range(1, RANKS + 1))):
        strategies: dict[tuple[object, ...], list[Configuration]] = {}
        for c in cells(mesh):
            key = (c.sequence_parallel, c.zero, c.recompute, c.context_form, c.schedule, c.stages)
            strategies.setdefault(key, []).append(c)
        for kinds in strategies.values():
            yield kinds[turn % len(kinds)]
            turn += 1


def check(configuration: Configuration) -> list[str]:
    """Mismatches of a cell; an error is one too."""
    try:
        return mismatches(configuration)
    except (TitanError, ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return [f"{type(error).__name__}: {error}"]


def run(configurations: Iterator[Configuration], seconds: float | None) -> dict[str, object]:
    """`failures` lists each mismatching cell with what differs."""
    start, done, failures = time.monotonic(), 0, {}
    for configuration in configurations:
        found = check(configuration)
        done += 1
        if found:
            failures[str(configuration)] = found[:5]
            print(f"{configuration}: {found[0]}", file=sys.stderr)
        if done % 100 == 0:
            print(f"{done} configurations, {len(failures)} mismatches", file=sys.stderr)
        if seconds is not None and time.monotonic() - start > seconds:
            break
    return {
        "configurations": done,
        "mismatches": len(failures),
        "tolerance": TOLERANCE,
        "seconds": round(time.monotonic() - start, 1),
        "failures": failures,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the pairwise sample of the tests")
    parser.add_argument("--all", action="store_true", help="cross the kinds of models too")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="the I-th of N shares")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)
    part, parts = map(int, options.part.split("/"))
    chosen = iter(pairwise(150)) if options.quick else grid() if options.all else rotated()
    found = run(islice(chosen, part - 1, None, parts), QUICK_SECONDS if options.quick else None)
    if options.json:
        print(json.dumps(found))
    else:
        print(f"{found['configurations']} configurations, {found['mismatches']} mismatches, {found['seconds']} s")
    return 1 if found["mismatches"] else 0


if __name__ == "__main__":
    sys.exit(main())
