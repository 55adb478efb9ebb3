"""A step time that no plan for a model, batch and cluster gets below, by the prices that plans are simulated with.

Every operator is priced as on one device that holds everything, takes the whole batch at once and whose kernels are
never short of tiles for their last wave: no other layout gives kernels larger or fewer shapes, so none computes a
sequence in less time. That work and the optimizer's, spread evenly over all devices, is the bound. Bubble,
communication and recompute are not in it: what meshes have of these is in the search's bound.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from titan.compiler.cost.compute import segment_seconds
from titan.compiler.cost.curves import Curve
from titan.compiler.cost.machine import Machine
from titan.compiler.graph.build import COMPUTE_DTYPE, build
from titan.compiler.plan.operators import DTYPE_BYTES, statistics_dtype
from titan.compiler.plan.segment import Segment

if TYPE_CHECKING:
    from titan.compiler.plan.program import Plan
    from titan.compiler.spec.schema import Spec

MARGIN = 1e-6  # of the bound: plans are priced in whole nanoseconds


def ideal(machine: Machine) -> Machine:
    """The machine with kernels that are as fast, for their size, as the fastest of any size: what they compute takes no
    less time in parts."""
    figures = {**machine.figures, "processors": min(machine.figures["processors"], 1.0)}
    return replace(machine, figures=figures, curves={name: _fastest(c) for name, c in machine.curves.items()})


def _fastest(curve: Curve) -> Curve:
    """The best rate of a curve at any size: straight in the logarithms, it is best at one of its points."""
    rate = min(seconds / size for size, seconds in zip(curve.sizes, curve.seconds, strict=True))
    return Curve((1.0,), (rate,))


def lower_bound(plan: Plan, machine: Machine) -> float:
    """Seconds; for the model, training and devices in a plan's settings, whatever its layout."""
    from titan.compiler.spec.model import Model

    model = Model.model_validate(plan.setting("model"))
    names = ("global_batch", "sequence", "precision", "separator")
    train = SimpleNamespace(**{name: plan.setting(f"train.{name}") for name in names})
    work = compute_seconds(cast("Spec", SimpleNamespace(model=model, train=train)), ideal(machine))
    dtype = COMPUTE_DTYPE[train.precision]
    statistic, size = DTYPE_BYTES[statistics_dtype(dtype)], DTYPE_BYTES[dtype]
    update = model.parameter_count() * (6 * statistic + size) / machine.memory_bandwidth
    return (work + update) / plan.mesh.world_size * (1 - MARGIN)


def compute_seconds(spec: Spec, machine: Machine) -> float:
    """Forward and backward of the whole batch on one device, logits kept or formed in pieces, whichever is less."""
    return min(_once(spec, machine, rows) for rows in (0, spec.train.sequence))


def _once(spec: Spec, machine: Machine, loss_rows: int) -> float:
    from titan.compiler.passes.registry import run
    from titan.compiler.strategy import Strategy

    strategy = Strategy(micro_batch=spec.train.global_batch, loss_rows=loss_rows)
    heads = spec.model.attention.kv_heads if spec.model.attention else 1
    graph = run(build(spec, strategy, strategy.mesh(heads)), strategy)
    parts: dict[int, float] = {}
    for index in {index for index, _ in graph.chain}:
        segments: list[Any] = [step for step in graph.parts[index].steps if isinstance(step, Segment)]
        prices = [segment_seconds(machine, segment) for segment in segments]
        parts[index] = sum(p.forward + p.backward_input + p.backward_weight for p in prices)
    return sum(parts[index] for index, _ in graph.chain)
