"""Equivalence over the grid: `python -m tests.benchmarks.equivalence [--quick | --all] [--part I/N] [--json]`.

Loopback, one process and plain autograd in float64 must agree on loss, every gradient, norm and updated parameters to
1e-9 over two steps. By default: every mesh of up to 16 ranks x sequence parallelism, ZeRO-1, full recompute, uneven
stages, tied head and odd vocabulary, all other switches and kinds of models taking turns (90 minutes of one core);
`--all` crosses those too (days); `--quick` is the pairwise sample of the tests. `--part` does the I-th of N shares.

`memory_worst_pct` is the largest gap between predicted and measured bytes of a rank, of its peak and of what its
registers hold between instructions, over all cells (`memory_worst` says which); `memory_outside` counts cells beyond
2 %.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice, product
from typing import Any

import torch
from titan.grammar.diagnostics import TitanError

from tests.equivalence.comparison import TOLERANCE, mismatches
from tests.equivalence.configurations import RANKS, Configuration, grid, meshes, pairwise, possible, switches
from tests.equivalence.memory import worst

QUICK_SECONDS = 150.0  # a quick run ends within three minutes whatever the machine; it says how many it did


CROSSED: dict[str, tuple[Any, ...]] = {
    "sequence_parallel": (False, True),
    "zero": (0, 1),
    "recompute": ("none", "full"),
    "stages": ("even", "uneven"),
    "tied": (False, True),
    "odd": (False, True),
}


def crossed() -> Iterator[Configuration]:
    """Every mesh, with the product of the switches above; on each also further forms of ZeRO. What is not crossed
    (schedules, context forms, families, offload, further tiers) takes turns from cell to cell."""
    turns: Counter[str] = Counter()
    for mesh in meshes(tuple(range(1, RANKS + 1))):
        table = switches(mesh)
        named = {key: tuple(v for v in values if v in table[key]) for key, values in CROSSED.items()}
        plain = [dict(zip(named, values, strict=True)) for values in product(*named.values())]
        further = tuple(zero for zero in table["zero"] if zero not in CROSSED["zero"])
        for cell in [
            *plain,
            *({**c, "zero": further, "recompute": table["recompute"]} for c in _halves(plain, further)),
        ]:
            yield _turned(mesh, table, cell, turns)


def _halves(plain: list[dict[str, Any]], further: tuple[Any, ...]) -> list[dict[str, Any]]:
    """The cells without ZeRO and recompute, once more with the further forms."""
    return [c for c in plain if further and not c["zero"] and c["recompute"] == "none"]


def _turned(
    mesh: tuple[int, ...], table: dict[str, tuple[Any, ...]], cell: dict[str, Any], turns: Counter[str]
) -> Configuration:
    """The cell with a value for every switch: the next of its values that the others allow."""
    while True:
        values: dict[str, Any] = {}
        for key, choices in table.items():
            fixed = cell.get(key, choices)
            values[key] = fixed[turns[key] % len(fixed)] if isinstance(fixed, tuple) else fixed
            turns[key] += isinstance(fixed, tuple)
        found = Configuration(*mesh, **values)
        if possible(found):
            return found
        turns["family"] += 1


def check(configuration: Configuration) -> list[str]:
    """Mismatches of a cell; an error is one too."""
    try:
        return mismatches(configuration)
    except (TitanError, ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return [f"{type(error).__name__}: {error}"]


def memory(configuration: Configuration) -> float:
    """Percent; infinite where the plan cannot be made or run."""
    try:
        return worst(configuration)
    except (TitanError, ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError):
        return float("inf")


def run(configurations: Iterator[Configuration], seconds: float | None) -> dict[str, object]:
    """`failures` lists each mismatching cell with what differs."""
    start, done, failures = time.monotonic(), 0, {}
    gaps: dict[str, float] = {}
    for configuration in configurations:
        found = check(configuration)
        gaps[str(configuration)] = memory(configuration)
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
        "memory_worst_pct": max(gaps.values(), default=0.0),
        "memory_worst": max(gaps, key=lambda name: gaps[name], default=""),
        "memory_outside": sum(gap > 2.0 for gap in gaps.values()),
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
    chosen = iter(pairwise(150)) if options.quick else grid() if options.all else crossed()
    found = run(islice(chosen, part - 1, None, parts), QUICK_SECONDS if options.quick else None)
    if options.json:
        print(json.dumps(found))
    else:
        print(
            f"{found['configurations']} configurations, {found['mismatches']} mismatches, memory within"
            f" {found['memory_worst_pct']:.2f} %, {found['seconds']} s"
        )
    return 1 if found["mismatches"] or found["memory_outside"] else 0


if __name__ == "__main__":
    sys.exit(main())
