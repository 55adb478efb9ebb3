"""Every schedule proven and trained: `python -m tests.benchmarks.schedules [--quick] [--json]`.

On loopback with 1 to 16 ranks, uneven stages, tied embeddings and dropout, two numbers of micro-batches each, against
plain autograd in float64; and without execution, 64 ranks with 512 micro-batches, lowered and proven.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch
from titan.compiler.lower import lower
from titan.compiler.schedules.registry import SCHEDULES
from titan.compiler.strategy import Strategy
from titan.compiler.verify.proofs import verify

from tests.compiler.schedules.small import small_spec
from tests.equivalence.schedules import fewest, mismatches


def trained(ranks: tuple[int, ...]) -> dict[str, object]:
    """Loopback runs that differ from one process; `refused` counts ranks for which a schedule has no legal number."""
    done, refused, failures = 0, 0, {}
    for name in SCHEDULES:
        for number in ranks:
            for at_least in (1, number + 3):
                micro_batches = fewest(name, number, at_least)
                if micro_batches is None:
                    refused += 1
                    continue
                found = mismatches(name, number, micro_batches, zero=done % 2, steps=1)
                done += 1
                if found:
                    failures[f"{name} {number} {micro_batches}"] = found[:3]
                    print(f"{name}, {number} ranks, {micro_batches} micro-batches: {found[0]}", file=sys.stderr)
    return {"runs": done, "refused": refused, "mismatches": len(failures), "failures": failures}


def proven(ranks: int, micro_batches: int) -> dict[str, object]:
    """Seconds of CPU to lower and to prove a deep pipeline, per schedule, and findings."""
    found: dict[str, object] = {}
    for name, row in SCHEDULES.items():
        m = fewest(name, ranks, micro_batches)
        if name == "solved" or m is None:  # searched for, not made by a rule
            continue
        chunks = ranks * row.chunks
        spec = small_spec(layers=chunks, batch=m, devices=ranks)
        start = time.process_time()
        plan = lower(spec, Strategy(pipeline=ranks, micro_batches=m, schedule=name, stages=(1,) * chunks))
        middle = time.process_time()
        findings = sum(len(proof.findings) for proof in verify(plan).values())
        found[name] = {
            "lower_s": round(middle - start, 2),
            "verify_s": round(time.process_time() - middle, 2),
            "findings": findings,
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="up to 4 ranks, 16 ranks with 64 micro-batches")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = trained((1, 2, 3, 4) if options.quick else tuple(range(1, 17)))
    found["proven"] = proven(*(16, 64) if options.quick else (64, 512))
    if options.json:
        print(json.dumps(found))
    else:
        print(f"{found['runs']} runs, {found['mismatches']} mismatches, {found['refused']} refused")
        for name, row in found["proven"].items():  # type: ignore[attr-defined]
            print(f"{name:<18}{row}")
    return 1 if found["mismatches"] else 0


if __name__ == "__main__":
    sys.exit(main())
