"""A measured machine as a `.titan` file, in the words of the shipped clusters."""

from __future__ import annotations

import platform
from datetime import date

from titan.compiler.cost.curves import Curve
from titan.compiler.profile.measure import PRECISIONS, Measured
from titan.grammar.formatter import format_source

NAME = "here"


def cluster_text(found: Measured, module: str, day: date) -> str:
    """The whole file; `module` is its name without the suffix, as specs will import it."""
    backend = "gloo, one thread each" if found.device == "cpu" else "NCCL"
    where = f"{platform.machine()}, {found.cores} cores" if found.cores else f"{platform.machine()}, GPUs"
    source = f"measured {day.isoformat()} by titan profile"
    gather = found.curves.get(f"all_gather_{found.ranks}") or found.curves.get("all_gather_2")
    latency = gather.seconds[0] if gather else 1e-4
    bandwidth = gather.sizes[-1] / gather.seconds[-1] if gather else 1e9
    peaks = "\n".join(f"{PRECISIONS[d]} = {rate / 1e9:.4g} GFLOP/s" for d, rate in found.peaks.items())
    figures = {"matmul": 1.0, "memory": 1.0, "intra": 1.0, "inter": 1.0, **_attention(found), **found.figures}
    figures["launch_seconds"] = found.figures["call_seconds"] + min(c.seconds[0] for c in found.curves.values())
    figures |= {"allocator_slack": 0.03, "allocator_slack_upper": 0.08}
    efficiency = "\n".join(f'{name} = measured({value:.4g}, "{source}")' for name, value in sorted(figures.items()))
    curves = "\n".join(f"{name} = {_curve(curve, source)}" for name, curve in sorted(found.curves.items()))
    lacking = "".join(f"# Left out, for want of time: {what}.\n" for what in found.left_out)
    text = f"""# This machine ({where}; {backend}; PyTorch {found.version}),
# {source} with {found.ranks} ranks.
# In a spec beside this file:  import {module}     cluster = {module}.{NAME} with {{ devices_per_node = {found.ranks} }}
# `cores` are shared by the ranks; curves give seconds by size (bytes, or FLOP of matrix products). `inter` is not
# measured: it stands for a network like the one inside.
{lacking}
{NAME} = cluster {{
nodes = 1
devices_per_node = {found.ranks}
cores = {found.cores}
device = device {{
memory = {found.memory >> 20} MiB
peak = {{
{peaks}
}}
memory_bandwidth = {found.stream / 1e9:.4g} GB/s
}}
intra = link {{ bandwidth = {bandwidth / 1e9:.4g} GB/s, latency = {latency * 1e6:.4g} us }}
inter = link {{ bandwidth = {bandwidth / 1e9:.4g} GB/s, latency = {latency * 1e6:.4g} us }}
memory_reserved = {max(found.reserved >> 20, 1)} MiB
efficiency = {{
{efficiency}
}}
curves = {{
{curves}
}}
}}
"""
    return format_source(text, f"{module}.titan")


def _attention(found: Measured) -> dict[str, float]:
    """Share of the peak at the largest attention that was seen, forward and backward together: 4 and 10 FLOP for each
    pair and width."""
    forward, backward = (found.curves.get(f"attention_{p}") for p in ("forward", "backward_input"))
    if forward is None or backward is None or "f32" not in found.peaks:
        return {}
    size = forward.sizes[-1]
    return {"attention": 14 * size / (forward(size) + backward(size)) / found.peaks["f32"], "attention_half_keys": 0.0}


def _curve(curve: Curve, source: str) -> str:
    sizes, seconds = (", ".join(f"{x:.4g}" for x in row) for row in (curve.sizes, curve.seconds))
    return f'curve([{sizes}], [{seconds}], "{source}")'
