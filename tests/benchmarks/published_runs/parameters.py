"""The figures that published runs are fitted with: few, shared by all sources, each of one kind of machine, link or
software. Where a figure belongs to a cluster of the library, the fitted value stands there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.benchmarks.published_runs.layout import library_cluster
from tests.benchmarks.published_runs.rows import Row
from tests.benchmarks.published_runs.software import FIGURES, Software, software


@dataclass(frozen=True)
class Parameter:
    """A figure of the rows that `applies` holds for; `low` and `high` are what is physically sensible. `home`: the
    cluster of the library that holds its value, or nothing for `software.FIGURES`."""

    name: str
    figure: str
    low: float
    high: float
    applies: Callable[[Row, Software], bool]
    home: str = ""


def _device(*names: str) -> Callable[[Row, Software], bool]:
    return lambda row, _: row.text("gpu").startswith(names)


def _teton(row: Row, _: Software) -> bool:
    return row.text("gpu").startswith("H100-SXM-9")


def _hopper(row: Row, _: Software) -> bool:
    return row.text("gpu").startswith("H") and not _teton(row, _)


def _trait(holds: Callable[[Software], bool]) -> Callable[[Row, Software], bool]:
    return lambda _, traits: holds(traits)


def _all(row: Row, traits: Software) -> bool:
    return True


def _far(row: Row, _: Software) -> bool:
    return row.number("num_gpus") > row.number("gpus_per_node", 8)


def _older_kernels(row: Row, traits: Software) -> bool:
    return row.text("gpu").startswith("H") and traits.attention.startswith("flash")


BLACKWELL = ("B2", "B3", "GB")

PARAMETERS = (
    Parameter("matmul of A100", "matmul", 0.6, 0.95, _device("A100"), "dgx_a100"),
    Parameter("matmul of H100", "matmul", 0.5, 0.90, _hopper, "dgx_h100"),
    Parameter("matmul of H100 at 500 W", "matmul", 0.4, 0.90, _teton, "grand_teton"),
    Parameter("matmul of B200", "matmul", 0.4, 0.90, _device(*BLACKWELL), "dgx_b200"),
    Parameter("attention of A100", "attention", 0.2, 0.70, _device("A100"), "dgx_a100"),
    Parameter("attention of H100", "attention", 0.2, 0.70, _device("H"), "dgx_h100"),
    Parameter("attention of B200", "attention", 0.1, 0.70, _device(*BLACKWELL), "dgx_b200"),
    Parameter("half dim", "matmul_half_dim", 0.0, 200.0, _all, "dgx_a100"),
    Parameter("waves", "matmul_waves", 0.0, 1.0, _all, "dgx_a100"),
    Parameter("memory", "memory", 0.6, 0.95, _all, "dgx_a100"),
    Parameter("launch", "launch_seconds", 2e-6, 1.2e-5, _all, "dgx_a100"),
    Parameter("NVLink 3", "intra", 0.4, 0.95, _device("A100"), "dgx_a100"),
    Parameter("NVLink 4", "intra", 0.4, 0.95, _device("H"), "dgx_h100"),
    Parameter("NVLink 5", "intra", 0.3, 0.95, _device(*BLACKWELL), "dgx_b200"),
    Parameter("network", "inter", 0.2, 0.95, _far, "dgx_a100"),
    Parameter("overlap", "overlap_slowdown", 1.0, 1.5, _all, "dgx_a100"),
    Parameter("FlashAttention 1", "flash1", 0.3, 1.0, _trait(lambda s: s.attention == "flash1")),
    Parameter("FlashAttention 2 on H100", "flash2_hopper", 0.4, 1.0, _older_kernels),
    Parameter("hidden by engine", "engine_hidden", 0.0, 0.9, _trait(lambda s: s.hidden == "engine_hidden")),
    Parameter("hidden by torch", "torch_hidden", 0.0, 0.9, _trait(lambda s: s.hidden == "torch_hidden")),
    Parameter("unstated adapters", "unstated_adapters", 0.05, 1.0, _trait(lambda s: s.unstated_network)),
    Parameter("DeepSpeed's collectives", "deepspeed", 1.0, 8.0, _trait(lambda s: s.deepspeed)),
    Parameter("routed tokens", "expert_passes", 1.0, 12.0, lambda r, _: r.number("num_experts") > 0),
    Parameter("step", "step_seconds", 0.0, 0.2, _all),
)  # fmt: skip


def figures(row: Row, values: Sequence[float]) -> dict[str, float]:
    """What a vector of parameters says of a row."""
    traits = software(row)
    return {p.figure: v for p, v in zip(PARAMETERS, values, strict=True) if p.applies(row, traits)}


def current() -> tuple[float, ...]:
    """The values that clusters and software have now."""
    found = []
    for parameter in PARAMETERS:
        if parameter.home:
            found.append(library_cluster(parameter.home).efficiency[parameter.figure].value)
        else:
            found.append(FIGURES[parameter.figure])
    return tuple(found)
