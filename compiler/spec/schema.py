"""The spec: all blocks that a `.titan` file may have, by one import; `Spec` is a whole resolved file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field as Rule
from titan.compiler.plan.frozen import dataclass
from titan.compiler.spec.cluster import Cluster, Device, Efficiency, Link
from titan.compiler.spec.kinds import Part
from titan.compiler.spec.model import Attention, Dense, LayerGroup, Mla, Model, Moe, Rope, RopeScaling
from titan.compiler.spec.origin import DEFAULT, Origin
from titan.compiler.spec.train import AdamW, Train, Validation
from titan.compiler.spec.wishes import Parallel, Wish
from titan.grammar.diagnostics import Diagnostic, Span

__all__ = [
    "AdamW",
    "Attention",
    "Cluster",
    "Dense",
    "Device",
    "Efficiency",
    "LayerGroup",
    "Link",
    "Mla",
    "Model",
    "Moe",
    "Objective",
    "Parallel",
    "Rope",
    "RopeScaling",
    "Spec",
    "Train",
    "Validation",
    "Wish",
]


class Objective(Part):
    """What the search makes least, within which limits: the share of device memory that a plan may use, seconds of a
    step, devices in use, money of the whole job. `cost` as a goal is money per token."""

    goal: Literal["step_time", "cost", "memory"] = "step_time"
    memory_fraction: Annotated[float, Rule(gt=0, le=1)] = 0.92
    step_time: float | None = None
    devices: int | None = None
    cost: float | None = None

    @property
    def fewer(self) -> bool:
        """Whether a plan may leave devices of the cluster idle."""
        return self.goal == "cost" or self.devices is not None or self.cost is not None


@dataclass(frozen=True, slots=True)
class Spec:
    """A whole resolved file; `origins` says for each written path who wrote it and where."""

    model: Model
    cluster: Cluster
    train: Train
    parallel: Parallel = field(default_factory=Parallel)
    objective: Objective = field(default_factory=Objective)
    path: str = "<spec>"
    warnings: tuple[Diagnostic, ...] = ()
    origins: Mapping[str, Origin] = field(default_factory=dict, repr=False, compare=False)

    def origin(self, path: str) -> Origin:
        """Who wrote `path` ("parallel.tensor"); a default when nobody did."""
        return self.origins.get(path, DEFAULT)

    def span(self, path: str) -> Span | None:
        """Where `path` was written, else the block around it."""
        while path and path not in self.origins:
            path = path.rpartition(".")[0]
        return self.origin(path).span
