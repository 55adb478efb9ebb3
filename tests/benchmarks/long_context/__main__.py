"""Long sequences on real processes: `python -m tests.benchmarks.long_context [--quick] [--only PART ...] [--json]`.

long          a model of two layers and two heads of 64 trains on sequences of 131,072 tokens over four ranks, four
              minutes a step on two idle cores; `--only long --json` runs it alone, `--tokens N` takes another length
forms         ring, head exchange, mixed and gathered keys beside one process: seconds, also as predicted, those on
              processors of all ranks and of the busiest, bytes of registers, loss
activations   bytes per rank at one, two and four ranks, by the plan and as tensors are counted while they run;
              `activation_ratio` is the degree times the share of one rank's bytes that is left: 1 when they fall as 1/c
wire          bytes that the ranks sent, counted while they ran, against the formulas of every form
overlap       two ranks in two network namespaces joined by a limited link: how much of the transfers is hidden,
              beside a plan that waits at once and beside the simulation. Needs root; else counted as skipped
peer          the ring beside torch's context_parallel on CUDA devices. It has no kernel for CPUs: needs two devices;
              else counted as skipped
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from titan.compiler.cost.simulate import simulate

from tests.benchmarks.long_context.model import FORMS, attention_flops, plan, wire_bytes
from tests.benchmarks.long_context.overlap import attention_figure, overlap
from tests.benchmarks.long_context.peer import peer
from tests.benchmarks.long_context.ranks import Watching, run

LONG, RANKS = 131072, 4
RATES = (400, 800)  # megabits per second
LOSS_GAP = 1e-4  # most that the losses of two forms may differ, as a share: float32 sums in other orders


def long(tokens: int, steps: int) -> dict[str, Any]:
    form = FORMS[f"ring{RANKS}"]
    found = run(plan(tokens, form), steps, watching=Watching(tell=True))
    busy = max(min(r.attention) for r in found)
    return {
        "tokens": tokens,
        "ranks": RANKS,
        "losses": found[0].losses,
        "seconds": [max(r.seconds[s] for r in found) for s in range(steps)],
        "attention_seconds": busy,
        "attention_flops_per_s": attention_flops(tokens, RANKS) / busy,
        "register_bytes": max(r.registers for r in found),
        "sent": max(r.sent for r in found),
        "expected": wire_bytes(tokens, form),
    }


def forms(tokens: int, steps: int) -> dict[str, dict[str, Any]]:
    """Every form on the same model and data, beside one process; priced by the speed of attention here."""
    found: dict[str, dict[str, Any]] = {}
    for name, form in FORMS.items():
        shared = plan(
            tokens, form, f"devices_per_node = {form.context}, cores = {os.cpu_count()}, {attention_figure()}"
        )
        ran = run(shared, steps)
        found[name] = {
            "ranks": form.context,
            "seconds": min(max(r.seconds[s] for r in ran) for s in range(steps)),
            "predicted_seconds": simulate(shared).seconds,
            "processor_seconds": min(sum(r.processor[s] for r in ran) for s in range(steps)),
            "busiest_processor_seconds": min(max(r.processor[s] for r in ran) for s in range(steps)),
            "register_bytes": max(r.registers for r in ran),
            "loss": ran[0].losses[-1],
            "loss_gap": abs(ran[0].losses[-1] / found.get("one", {"loss": ran[0].losses[-1]})["loss"] - 1),
            "sent": max(r.sent for r in ran),
            "expected": wire_bytes(tokens, form),
        }
    return found


def activations(tokens: int) -> dict[str, Any]:
    """Bytes of registers by the plan, and of all tensors that a step makes, at a length that one rank can hold."""
    ran = {name: run(plan(tokens, FORMS[name]), 1, watching=Watching(count=True)) for name in ("one", "ring2", "ring4")}
    table: dict[str, Any] = {"tokens": tokens}
    for key in ("registers", "tensors"):
        held = {str(FORMS[name].context): max(getattr(r, key) for r in found) for name, found in ran.items()}
        table[f"{key}_bytes"] = held
        table[f"{key}_ratio"] = {c: found * int(c) / held["1"] for c, found in held.items()}
    return table


def measure(quick: bool, tokens: int, parts: tuple[str, ...]) -> dict[str, Any]:
    steps = 1 if quick else 3
    work: dict[str, Callable[[], dict[str, Any]]] = {
        "forms": lambda: forms(2048 if quick else 16384, 2),
        "activations": lambda: activations(8192 if quick else 32768),
        "overlap": lambda: overlap(8192 if quick else 16384, 3 if quick else 5, RATES[-1:] if quick else RATES),
        "peer": lambda: peer(tokens, steps),
        "long": lambda: long(tokens, steps),
    }
    found = {name: work[name]() for name in work if name in parts}
    sent = [*found.get("forms", {}).values(), *([found["long"]] if "long" in found else [])]
    return {
        "tokens": tokens,
        "activation_ratio": found.get("activations", {}).get("tensors_ratio"),
        "wire_bytes_exact": all(r["sent"] == r["expected"] for r in sent) if sent else None,
        "losses_equal": all(r["loss_gap"] < LOSS_GAP for r in found["forms"].values()) if "forms" in found else None,
        "hidden_share": found.get("overlap", {}).get("hidden_share"),
        **found,
        "skipped": _skipped(found),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


def _skipped(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: part["skipped"] for name, part in found.items() if "skipped" in part}


PARTS = ("forms", "activations", "overlap", "peer", "long")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter sequences, one step")
    parser.add_argument("--tokens", type=int, default=0, help=f"length of the long sequence; {LONG} without --quick")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    found = measure(options.quick, options.tokens or (16384 if options.quick else LONG), tuple(options.only))
    if options.json:
        print(json.dumps(found))
        return 0
    for key, value in found.items():
        print(f"{key:18} {value}", file=sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
