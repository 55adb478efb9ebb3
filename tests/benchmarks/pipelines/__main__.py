"""Pipelines side by side: `python -m tests.benchmarks.pipelines [--quick] [--json]`.

Two ranks, one thread each, one model; all contenders live in one pair of processes and take turns, one step each a
round, so that every ratio is of one round. The bound is the same compute without communication. Ratios above one are
in Titan's favour; each has a 95% interval over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.pipelines.ratios import Ratio, ratio
from tests.benchmarks.slow_link import Impossible, slow_link

ROOT = Path(__file__).parents[3]
RATE = 150  # megabits per second of the slow link
PEAKS = ("torch GPipe", "torch 1F1B", "torch Interleaved1F1B", "torch ZBVZeroBubble", "torch DualPipeV", "gpipe",
         "one_f_one_b", "interleaved", "zero_bubble_v", "dualpipe_v")  # fmt: skip
SAME = {"torch GPipe": "titan gpipe", "torch 1F1B": "titan one_f_one_b", "torch Interleaved1F1B": "titan interleaved",
        "torch ZBVZeroBubble": "titan zero_bubble_v", "torch DualPipeV": "titan dualpipe_v"}  # fmt: skip


class Failed(Exception):
    """A rank that ended early; the text is the end of what it wrote."""


def run(
    arguments: Sequence[str],
    prefixes: Sequence[list[str]] = ([], []),
    interfaces: Sequence[str] = ("lo", "lo"),
) -> list[dict[str, Any]]:
    """Both ranks of one run; what each wrote."""
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in (0, 1):
            command = [*prefixes[rank], sys.executable, "-m", "tests.benchmarks.pipelines.worker", folder, str(rank)]
            command += ["--interface", interfaces[rank], *arguments]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            with (Path(folder) / f"{rank}.err").open("w") as errors:
                started.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=errors, stdout=errors))
        try:
            codes = [process.wait() for process in started]
        finally:
            for process in started:
                process.kill()
        if any(codes):
            said = "".join((Path(folder) / f"{rank}.err").read_text()[-1500:] for rank in (0, 1))
            raise Failed(said)
        return [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def slowest(results: list[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Per contender and round: seconds of the slower rank, CPU seconds of both."""
    first, second = (result["times"] for result in results)
    return {
        name: [(max(a[0], b[0]), a[1] + b[1]) for a, b in zip(first[name], second[name], strict=True)] for name in first
    }


Times = dict[str, list[tuple[float, float]]]


def best(times: Times, side: str) -> str:
    """The contender of a side with the smallest median."""
    names = [name for name in times if name.startswith(side) and "bound" not in name]
    return min(names, key=lambda name: median(seconds for seconds, _ in times[name]))


def compare(times: Times, faster: str, slower: str, column: int = 0) -> Ratio:
    """`slower` over `faster`, round by round."""
    return ratio([s[column] / f[column] for f, s in zip(times[faster], times[slower], strict=True)])


def figures(times: Times) -> dict[str, Any]:
    """The ratios of one run, and a line per contender."""
    ours, theirs = best(times, "titan "), best(times, "torch ")
    found: dict[str, Any] = {
        "best": ours,
        "torch_best": theirs,
        "best_ratio_to_torch_best": compare(times, ours, theirs),
        "one_f_one_b_ratio": compare(times, "titan one_f_one_b", "torch 1F1B"),
        "schedules": {
            name: {
                "seconds": median(s for s, _ in rounds),
                "least": min(s for s, _ in rounds),
                "most": max(s for s, _ in rounds),
                "cpu_seconds": median(c for _, c in rounds),
            }
            for name, rounds in times.items()
        },
    }
    if "bound" in times:
        found["share_of_bound"] = compare(times, ours, "bound")
        found["share_of_torch_bound"] = compare(times, ours, "torch bound")
        found["torch_best_share_of_bound"] = compare(times, theirs, "bound")
        found["cpu_time_over_bound"] = compare(times, "bound", ours, 1)
    return found


def peaks(micro_batches: int) -> dict[str, int]:
    """Growth of resident memory in a step, the larger rank, every contender in processes of its own."""
    found: dict[str, int] = {}
    for name in PEAKS:
        results = run(["--names", name, "--peak", "--micro-batches", str(micro_batches)])
        for result in results:
            for contender, size in result["peak"].items():
                found[contender] = max(size, found.get(contender, 0))
    return found


def rate_limited(rounds: int, micro_batches: int) -> dict[str, Any]:
    """The same over a slow link; skipped, and counted, where it cannot be made."""
    names = "torch GPipe|torch 1F1B|torch Interleaved1F1B|torch InterleavedZeroBubble, 1 stage|torch ZBVZeroBubble"
    names += "|torch DualPipeV|one_f_one_b|zero_bubble_h1|zero_bubble_h2|zero_bubble_v|solved"
    names += "|solved, one chunk|solved, one chunk, one more|solved, one chunk, two more"
    try:
        with slow_link(RATE) as ends:
            arguments = ["--names", names, "--rounds", str(rounds), "--micro-batches", str(micro_batches)]
            results = run(arguments, [end.prefix for end in ends], [end.interface for end in ends])
    except (Impossible, Failed) as reason:
        return {"skipped": str(reason).strip()[-300:]}
    found = figures(slowest(results))
    return {"rate": f"{RATE}mbit", **found}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, fewer peaks")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--micro-batches", type=int, default=8)
    options = parser.parse_args()
    number = 4 if options.quick else 15
    warm_up = ["--warm-up", "1" if options.quick else "2"]
    say(f"{number} rounds of every schedule")
    results = run(["--rounds", str(number), "--micro-batches", str(options.micro_batches), *warm_up])
    report = figures(slowest(results))
    report["interpreter_us_per_instruction"] = max(result["overhead"][0] for result in results)
    report["interpreter_share"] = max(result["overhead"][1] for result in results)
    report["peak_tensor_bytes"] = {n: max(r["tensors"][n] for r in results) for n in results[0]["tensors"]}
    say(str(report["best_ratio_to_torch_best"]) + "; now over a slow link")
    slow = rate_limited(2 if options.quick else 8, options.micro_batches)
    report["rate_limited"] = slow
    report["rate_limited_ratio"] = slow.get("best_ratio_to_torch_best")
    report["skipped"] = int("skipped" in slow)
    if not options.quick:
        say("peaks of resident memory, one contender at a time")
        report["peak_resident_bytes"] = peaks(options.micro_batches)
        report["peaks_not_higher"] = {
            theirs: report["peak_resident_bytes"][ours] <= report["peak_resident_bytes"][theirs]
            for theirs, ours in SAME.items()
        }
    report |= {"micro_batches": options.micro_batches, "ranks": 2, "rounds": number}
    print(json.dumps(report, default=lambda value: value.shown()) if options.json else text(report))
    return 0


def text(report: dict[str, Any]) -> str:
    lines = [f"{'':<38}{'median ms':>10}{'least':>8}{'most':>8}{'CPU ms':>9}"]
    for name, row in sorted(report["schedules"].items(), key=lambda item: item[1]["seconds"]):
        shown = (1e3 * row[key] for key in ("seconds", "least", "most", "cpu_seconds"))
        lines.append(f"{name:<38}" + "{:>10.0f}{:>8.0f}{:>8.0f}{:>9.0f}".format(*shown))
    for key, value in report.items():
        if isinstance(value, Ratio):
            lines.append(f"{key}: {value}")
    lines.append(f"interpreter: {report['interpreter_us_per_instruction']:.1f} us per instruction, "
                 f"{report['interpreter_share']:.2%} of the step")  # fmt: skip
    slow = report["rate_limited"]
    lines.append(f"slow link: {slow.get('skipped') or slow['best_ratio_to_torch_best']}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
