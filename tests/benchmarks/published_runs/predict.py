"""Step time and memory of a published layout: its plan is compiled and simulated, with what the run's software did
otherwise added to the prices of its instructions.

A step with many micro-batches is simulated with three and four times as many as stages; beyond these every further one
adds the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from titan.compiler.cost.machine import Machine, read_machine
from titan.compiler.cost.simulate import simulate
from titan.compiler.lower import lower
from titan.compiler.plan.program import Plan
from titan.compiler.spec.schema import Cluster
from titan.compiler.strategy import Strategy

from tests.benchmarks.published_runs.held import held_bytes
from tests.benchmarks.published_runs.layout import planned, shortened
from tests.benchmarks.published_runs.rows import Row
from tests.benchmarks.published_runs.run_prices import RunPrices, traced
from tests.benchmarks.published_runs.software import FIGURES, RESERVED, Software, software


@dataclass(frozen=True, slots=True)
class Predicted:
    """Seconds of the step; bytes on the fullest rank: tensors, point, upper bound, and what lies outside the allocator;
    bytes of the device."""

    seconds: float
    tensors: int
    point: int
    upper: int
    outside: int
    device: int

    def held(self, kind: str) -> float:
        """What a source of this kind reports: tensors, what the allocator has reserved for them, or all of it."""
        kind = kind.lower()
        if "allocated" in kind or "as reported" in kind:
            return self.tensors
        cached = self.tensors * RESERVED
        return self.tensors + cached if "reserved" in kind else self.outside + self.tensors + cached


@dataclass(frozen=True)
class Prepared:
    """A row's layout and plans, `counts` micro-batches in each: all that does not depend on prices."""

    row: Row
    cluster: Cluster
    strategy: Strategy
    software: Software
    counts: tuple[int, ...]
    plans: tuple[Plan, ...]

    def machine(self, figures: Mapping[str, float]) -> Machine:
        """The row's machine; `figures` replace those of the cluster and of the software."""
        return run_machine(self.row, self.cluster, self.software, figures)

    def seconds(self, figures: Mapping[str, float] | None = None) -> float:
        """Seconds of the whole step."""
        machine, number = self.machine(figures or {}), self.strategy.micro_batches
        times = [simulate(p, machine, prices=RunPrices(p, machine, self.software)).seconds for p in self.plans]
        seconds = times[0]
        if len(times) > 1:
            few, more = self.counts
            seconds += (number - few) * (times[1] - times[0]) / (more - few)
        whole = self.strategy.data * self.strategy.micro_batch * number
        return seconds * self.row.number("global_batch_seqs") / whole


def prepare(row: Row, memory_only: bool = False) -> Prepared:
    """Raises layout.Refused where the row cannot be planned."""
    spec, strategy = planned(row)
    traits, number = software(row), strategy.micro_batches
    few, more = 3 * strategy.pipeline, 4 * strategy.pipeline
    counts = (number,) if number <= more else (few, more)
    if memory_only:
        counts = counts[:1]
    plans = tuple(traced(lower(*shortened(strategy, spec, count)), traits) for count in counts)
    return Prepared(row, spec.cluster, strategy, traits, counts, plans)


def predict(row: Row, figures: Mapping[str, float] | None = None, memory_only: bool = False) -> Predicted:
    """Raises layout.Refused where the row cannot be planned. `figures` replace those of cluster and software."""
    found = prepare(row, memory_only)
    machine = found.machine(figures or {})
    seconds = 0.0 if memory_only else found.seconds(figures)
    return Predicted(seconds, *held_bytes(found.plans[0], machine, found.software), machine.memory)


def run_machine(row: Row, cluster: Cluster, traits: Software, figures: Mapping[str, float]) -> Machine:
    """A cluster as the row's software finds it."""
    given = cluster.model_dump()
    own = {name: f["value"] if isinstance(f, Mapping) else f for name, f in given["efficiency"].items()}
    merged = {**own, **FIGURES, **figures}
    hopper = row.text("gpu").startswith("H")
    if traits.attention == "flash2" and hopper:
        merged["attention"] *= merged["flash2_hopper"]
    elif traits.attention == "flash1":
        merged["attention"] *= merged["flash1"] * (merged["flash2_hopper"] if hopper else 1.0)
    if traits.unstated_network:
        merged["adapters"] = merged["unstated_adapters"]
    found = read_machine({**given, "efficiency": merged})
    return replace(found, figures={**found.figures, **merged})
