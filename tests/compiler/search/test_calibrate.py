"""Closed forms on a measured machine are those of its curves: against the price of a plan for one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from titan.compiler.cost.layer import LayerCost
from titan.compiler.cost.prices import Prices
from titan.compiler.lower import lower
from titan.compiler.search.search import estimator_of
from titan.compiler.spec.resolve import resolve
from titan.compiler.spec.schema import Spec
from titan.compiler.strategy import Strategy
from titan.grammar.parser import parse

CURVES = """curves = {
        linear_forward         = curve([1e5, 1e9], [2e-5, 2e-2], "made up")
        linear_backward_input  = curve([1e5, 1e9], [3e-5, 3e-2], "made up")
        linear_backward_weight = curve([1e5, 1e9], [9e-5, 5e-2], "made up")
        rms_norm_forward       = curve([1e3, 1e7], [7e-5, 7e-2], "made up")
        rms_norm_backward      = curve([1e3, 1e7], [8e-5, 9e-2], "made up")
    }"""


def measured(curves: str) -> Spec:
    text = f"""import clusters.local
import models.tiny
model = tiny.llama
cluster = local.cpu with {{ devices_per_node = 2, {curves} }}
train {{ sequence = 64, global_batch = 8, precision = fp32, steps = 4, optimizer = adamw {{ learning_rate = 1e-3 }}
    data = synthetic(256) }}
"""
    return resolve(parse(text, "spec.titan"), Path())


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_passes_of_layers_and_head_take_what_a_plan_for_one_rank_takes(micro_batch: int) -> None:
    spec = measured(CURVES)
    estimator = estimator_of(spec)
    alone = Strategy(micro_batch=micro_batch, micro_batches=1, stages=(estimator.shape.layers,))
    plan = lower(spec, alone)
    prices, role = Prices(plan, estimator.machine), plan.roles[0]
    cut = estimator.cut(alone)
    layer, head = estimator.layer(cut), estimator.head(cut)
    for opcode in ("forward", "backward"):
        units = [i for *_, i in role.instructions("train") if i.opcode == opcode and not i.unit.startswith("embed")]
        found = estimator.shape.layers * getattr(layer, opcode) + getattr(head, opcode)
        assert found == pytest.approx(sum(prices.price(role, i) for i in units) * 1e-9)


def test_without_curves_they_stay() -> None:
    estimator = estimator_of(measured("cores = 2"))
    assert estimator.longer is None


def test_what_is_waited_for_does_not_take_longer() -> None:
    cost = LayerCost(10.0, 20.0, 1, 1, (3, 4.0), (5, 6.0), traffic=(2.0, 3.0), ring=(1.0, 2.0), weight=8.0)
    found = cost.longer((2.0, 3.0))
    assert (found.forward, found.backward, found.weight) == (3 + 2 * 7, 5 + 3 * 15, 24)
    assert (found.selective, found.full, found.traffic) == ((3, 8.0), (5, 12.0), (2.0, 3.0))
