"""One GPU: predicted and measured step time and memory: `python -m tests.benchmarks.one_gpu --cluster FILE [--json]`.

FILE is what `titan profile --device cuda --ranks 1 -o FILE` wrote on this machine. Models of 1 to 3 billion parameters
in bfloat16 train five steps in layouts that one device can have (micro-batches, recompute, offload, long sequences);
the median step is compared with the prediction, the allocator's peak with the sum of the plan's components. Let nothing
else use the device.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from titan.compiler.cost.mfu import model_flops
from titan.compiler.cost.simulate import simulate
from titan.compiler.pipeline import compile_spec
from titan.compiler.plan.program import Plan
from titan.compiler.plan.sizes import Sizes, memory_by_component
from titan.runtime.data import SyntheticSource
from titan.runtime.drive import drive
from titan.runtime.interpreter import Executable
from titan.runtime.state import allocate
from titan.runtime.transport.echo import EchoTransport

STEPS = 5
SPEC = """import {module}
model = model {{
    vocab = {vocab}, hidden = {hidden}, layers = {layers} * dense {{ ffn = {ffn} }}
    attention = gqa {{ heads = {heads}, kv_heads = {kv_heads} }}, norm = rms_norm
    positions = rope, rope = {{ theta = 500000 }}, max_positions = 16384
}}
cluster = {module}.here with {{
    host_memory = 100 GiB, host_link = link {{ bandwidth = 50 GB/s, latency = 10 us }}
}}
train {{
    sequence = {sequence}, global_batch = {batch}, precision = bf16, steps = {steps}, clip = 1.0
    optimizer = adamw {{ learning_rate = 1e-4 }}, data = synthetic({vocab})
}}
parallel {{ {parallel} }}
"""
SMALL = {"vocab": 32000, "hidden": 2048, "layers": 16, "ffn": 5632, "heads": 16, "kv_heads": 4}
MIDDLE = {"vocab": 32000, "hidden": 3072, "layers": 24, "ffn": 8192, "heads": 24, "kv_heads": 8}
WIDE = {"vocab": 64000, "hidden": 4096, "layers": 8, "ffn": 14336, "heads": 32, "kv_heads": 8}
CASES = (
    (SMALL, 4096, 16, "micro_batch = 4, recompute = none"),
    (SMALL, 4096, 16, "micro_batch = 1, recompute = none"),
    (SMALL, 4096, 16, "micro_batch = 4, recompute = full"),
    (SMALL, 4096, 16, "micro_batch = 4, recompute = selective"),
    (SMALL, 16384, 4, "micro_batch = 1, recompute = none"),
    (SMALL, 4096, 8, "micro_batch = 4, recompute = none, offload = optimizer"),
    (MIDDLE, 4096, 8, "micro_batch = 2, recompute = none"),
    (WIDE, 8192, 4, "micro_batch = 1, recompute = none"),
)


def plan_of(folder: Path, module: str, case: tuple[dict[str, int], int, int, str]) -> Plan:
    model, sequence, batch, parallel = case
    path = folder / "case.titan"
    text = SPEC.format(module=module, sequence=sequence, batch=batch, parallel=parallel, steps=STEPS, **model)
    path.write_text(text)
    return compile_spec(path).plan


def measured(plan: Plan, device: torch.device) -> tuple[float, int]:
    """Median seconds of a step after the first, and the most bytes of tensors in one."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    state = allocate(plan, 0, device)
    source = SyntheticSource(int(plan.setting("model")["vocab"]), 1)
    executable = Executable(plan, 0, EchoTransport(0, device), state, source)
    seconds = []
    for step in range(STEPS):
        start = time.perf_counter()
        drive(executable, step)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:]), torch.cuda.max_memory_allocated() - before


def row_of(plan: Plan, case: tuple[dict[str, int], int, int, str], device: torch.device) -> dict[str, Any]:
    seconds, peak = measured(plan, device)
    predicted = simulate(plan).seconds
    expected = sum(memory_by_component(plan, plan.roles[0], Sizes(plan)).values())
    tokens = case[1] * case[2] / seconds
    flops = model_flops(plan.setting("model"), case[1]).exact
    return {
        "layout": f"{case[0]['hidden']} wide, {case[0]['layers']} layers, {case[1]} tokens, {case[3]}",
        "predicted_s": predicted,
        "measured_s": seconds,
        "time_pct": 100 * (predicted / seconds - 1),
        "predicted_bytes": expected,
        "measured_bytes": peak,
        "memory_pct": 100 * (expected / peak - 1),
        "tokens_per_s": tokens,
        "mfu_pct_of_measured_peak": 100 * tokens * flops / plan.setting("cluster")["device"]["peak"]["bf16"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", type=Path, required=True, metavar="FILE", help="what `titan profile` wrote here")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no CUDA device: nothing measured", file=sys.stderr)
        return 2
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / options.cluster.name).write_bytes(options.cluster.read_bytes())
        for case in CASES:
            rows.append(row_of(plan_of(Path(folder), options.cluster.stem, case), case, device))
            print(f"{len(rows)} of {len(CASES)}: {rows[-1]['layout']}", file=sys.stderr)
    found = {
        "layouts": len(rows),
        "median_abs_pct": median(abs(row["time_pct"]) for row in rows),
        "memory_median_abs_pct": median(abs(row["memory_pct"]) for row in rows),
        "rows": rows,
    }
    if options.json:
        print(json.dumps(found))
    else:
        for row in rows:
            print(
                f"{row['layout']}: {row['measured_s']:.3f} s ({row['time_pct']:+.1f} %),"
                f" {row['measured_bytes'] / 2**30:.1f} GiB ({row['memory_pct']:+.1f} %),"
                f" MFU {row['mfu_pct_of_measured_peak']:.1f} % of the measured peak"
            )
        print(f"median error {found['median_abs_pct']:.1f} % of time, {found['memory_median_abs_pct']:.1f} % of memory")
    return 0


if __name__ == "__main__":
    sys.exit(main())
