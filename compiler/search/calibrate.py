"""Closed forms on a measured machine. Its curves say what each operator takes, which no peak and no bandwidth do; so
the compute of a layer and of the head is made that of a plan for one rank, by size of the micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from titan.compiler.cost.estimate import Estimator
from titan.compiler.cost.layer import Both, LayerCost, LayerPrices, Longer
from titan.compiler.cost.prices import Prices
from titan.compiler.plan.segment import parse_unit
from titan.compiler.strategy import Strategy

if TYPE_CHECKING:
    from titan.compiler.spec.schema import Spec


def longer_than_closed(spec: Spec, estimator: Estimator) -> Callable[[int], Longer]:
    """By sequences of a micro-batch: how many times as long as in closed form the passes of a layer and of the head
    take on one rank."""
    plain, layers = LayerPrices(estimator.machine, estimator.shape), estimator.shape.layers

    @cache
    def longer(micro_batch: int) -> Longer:
        alone = Strategy(micro_batch=micro_batch, micro_batches=1, stages=(layers,))
        layer, head = _measured(spec, alone, estimator)
        cut = estimator.cut(alone)
        return Longer(_ratio(layer, plain.layer(cut), layers), _ratio(head, plain.head(cut), 1))

    return longer


def _measured(spec: Spec, alone: Strategy, estimator: Estimator) -> tuple[Both, Both]:
    """Seconds forward and backward of all layers, and of the head, in a step of one micro-batch."""
    from titan.compiler.lower import lower

    plan = lower(spec, alone)
    prices, role = Prices(plan, estimator.machine), plan.roles[0]
    found = {"layer": [0.0, 0.0], "head": [0.0, 0.0], "embed": [0.0, 0.0]}
    for *_, i in role.instructions("train"):
        if i.opcode in ("forward", "backward"):
            name = parse_unit(i.unit)[0].partition(".")[0]
            found[name if name in found else "layer"][i.opcode == "backward"] += prices.price(role, i) * 1e-9
    return (found["layer"][0], found["layer"][1]), (found["head"][0], found["head"][1])


def _ratio(measured: Both, closed: LayerCost, number: int) -> Both:
    return measured[0] / (number * closed.forward), measured[1] / (number * closed.backward)
