"""The machine as prices need it: peaks, bandwidths, latencies and efficiency figures of one cluster, as plain numbers.

It is read from the cluster of a plan's settings, so that a plan file can be priced without its spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from titan.compiler.cost.curves import Curve, read_curves
from titan.compiler.plan.frozen import dataclass

# plan dtype -> name of the peak in a cluster's device
PEAK_OF = {"f8": "fp8", "bf16": "bf16", "f16": "fp16", "f32": "fp32", "f64": "fp64"}

# figure -> (default, meaning); a cluster's `efficiency` overrides any of them, each with its source
FIGURES: dict[str, tuple[float, str]] = {
    "matmul": (0.70, "share of the dense peak that a large matrix product reaches"),
    "matmul_fp8": (0.60, "the same of a product in 8 bits, without the casts"),
    "matmul_half_flops": (0.0, "work at which a matrix product reaches half of that: f/(f+half)"),
    "matmul_half_dim": (
        64.0,
        "dim at which a product reaches half of that: d/(d+half) for k, and without tiles m, n",
    ),
    "processors": (0.0, "multiprocessors that a product's tiles are dealt to; 0: tiles are not looked at"),
    "matmul_waves": (1.0, "how far products suffer from partly empty tiles and waves: share ** this"),
    "cast_bytes": (6.0, "bytes that move when a number is cast to 8 bits"),
    "attention": (0.45, "share of the dense peak that fused attention reaches, forward and backward together"),
    "attention_half_keys": (256.0, "keys at which attention reaches half of that"),
    "memory": (0.85, "share of the memory bandwidth that streaming kernels reach"),
    "launch_seconds": (4e-6, "shortest time of one operator"),
    "host_seconds": (0.0, "time in which the host issues one operator; a segment is never faster than its host"),
    "call_seconds": (0.0, "time of the interpreter around each operator call"),
    "instruction_seconds": (0.0, "time of the interpreter for each instruction"),
    "issue_seconds": (0.0, "time in which a rank asks for a transfer or a collective, as a part of what it takes"),
    "communication_load": (1.0, "share of a core that a rank's running collective takes, where ranks share cores"),
    "polling_load": (0.0, "share of a core that a rank takes of others while it polls for what it waits for"),
    "polling_seconds": (0.0, "time for which a wait polls before it sleeps"),
    "step_seconds": (0.0, "fixed time of a step outside its instructions: data, bookkeeping, unequal ranks"),
    "misaligned": (0.5, "rate of products of attention heads whose width is no multiple of 8, as a share"),
    "intra": (0.80, "share of the link bandwidth that collectives reach inside a node"),
    "inter": (0.80, "share of the link bandwidth that collectives reach between nodes"),
    "host": (0.85, "share of the bandwidth of the link to the host that copies reach"),
    "adapters": (1.0, "network adapters per device; devices that share one share its bandwidth when all of them send"),
    "overlap_slowdown": (1.1, "how much longer compute takes while a collective runs beside it"),
    "communicator_bytes": (64.0 * 2**20, "device memory that one communicator takes"),
    "allocator_slack": (0.01, "share of tensor memory lost to rounding and fragmentation that no retry wins back"),
    "allocator_slack_upper": (0.08, "the same, an upper bound"),
    "flops": (2.0e10, "FLOP/s that kernels reach, taken when the device's peak is not known"),
}


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the network: bytes/s per device one way as collectives reach it, seconds per message."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Machine:
    """Figures of a cluster in base units; `peaks` by plan dtype, without entries that are not known; `curves` are
    measured and stand before formulas. The devices of a node share `cores`; 0: each computes by itself."""

    name: str
    nodes: int
    devices_per_node: int
    memory: int
    reserved: int
    memory_bandwidth: float
    peaks: Mapping[str, float]
    intra: Level
    inter: Level
    host: Level  # of a device to its node's memory, each way
    price_per_device_hour: float | None
    figures: Mapping[str, float]
    curves: Mapping[str, Curve] = field(default_factory=dict)
    cores: int = 0

    def peak(self, dtype: str) -> float | None:
        """Dense peak FLOP/s of a dtype, None when not known."""
        return self.peaks.get(dtype)

    def rate(self, dtype: str, kind: str) -> float:
        """FLOP/s that large kernels of a kind (`matmul`, `attention`) reach."""
        peak = self.peaks.get(dtype)
        if dtype == "f8" and kind == "matmul":
            kind = "matmul_fp8"
        return peak * self.figures[kind] if peak else self.figures["flops"]


def read_machine(cluster: Mapping[str, Any]) -> Machine:
    """Machine of a cluster's plain dictionary (`plan.setting("cluster")`). Where it says nothing of its link to the
    host, nothing is offloaded; the link inside the node stands there."""
    device = cluster["device"]
    figures = {name: default for name, (default, _) in FIGURES.items()}
    for name, figure in (cluster.get("efficiency") or {}).items():
        figures[name] = float(figure["value"] if isinstance(figure, Mapping) else figure)
    peak = device.get("peak") or {}
    return Machine(
        name=str(cluster.get("name", "cluster")),
        nodes=int(cluster.get("nodes", 1)),
        devices_per_node=int(cluster["devices_per_node"]),
        memory=int(device["memory"]),
        reserved=int(cluster.get("memory_reserved") or 0),
        memory_bandwidth=float(device["memory_bandwidth"]) * figures["memory"],
        peaks={dtype: float(peak[name]) for dtype, name in PEAK_OF.items() if peak.get(name)},
        intra=_level(cluster["intra"], figures["intra"]),
        inter=_level(cluster["inter"], figures["inter"] * min(figures["adapters"], 1.0)),
        host=_level(cluster.get("host_link") or cluster["intra"], figures["host"]),
        price_per_device_hour=cluster.get("price_per_device_hour"),
        figures=figures,
        curves=read_curves(cluster),
        cores=int(cluster.get("cores") or 0),
    )


def _level(link: Mapping[str, Any], share: float) -> Level:
    return Level(float(link["bandwidth"]) * share, float(link["latency"]))
