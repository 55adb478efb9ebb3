"""Measured curves: between and beyond their points, read from a cluster, and before formulas in prices."""

from __future__ import annotations

from pathlib import Path

import pytest
from titan.compiler.cost.compute import segment_seconds
from titan.compiler.cost.curves import Curve, attention_size, product_size
from titan.compiler.cost.machine import Machine, read_machine
from titan.compiler.cost.network import Placement, collective_seconds, transfer_seconds
from titan.compiler.cost.prices import Prices
from titan.compiler.lower import lower
from titan.compiler.spec.resolve import resolve
from titan.compiler.spec.schema import Spec
from titan.compiler.strategy import Strategy
from titan.grammar.diagnostics import TitanError
from titan.grammar.parser import parse


def spec_of(cluster: str) -> Spec:
    text = f"""import clusters.local
import models.tiny
model = tiny.llama with {{ layers = 2 * dense {{ ffn = 192 }} }}
cluster = local.cpu with {{ devices_per_node = 2, {cluster} }}
train {{
    sequence = 32, global_batch = 4, precision = fp32, steps = 4
    optimizer = adamw {{ learning_rate = 0.001 }}, data = synthetic(256)
}}
"""
    return resolve(parse(text, "curves.titan"), Path())


def machine_of(cluster: str) -> Machine:
    return read_machine(spec_of(cluster).cluster.model_dump())


def test_a_curve_keeps_launches_and_rates() -> None:
    curve = Curve((1e3, 1e5), (1e-5, 1e-3))
    assert curve(1) == curve(1e3) == 1e-5
    assert curve(1e4) == pytest.approx(1e-4)  # halfway in both logarithms
    assert curve(2e5) == pytest.approx(2e-3)  # the last rate


def test_sizes_count_padded_products_and_visible_pairs() -> None:
    assert product_size(8, 16, 32, 0.0) == 2 * 8 * 16 * 32
    assert product_size(8, 16, 32, 8.0) == 2 * 16 * 24 * 40
    assert attention_size(1, 4, 4, 1, causal=False) == 16
    assert attention_size(1, 2, 4, 1, causal=True) == 2 * 2 + 2 * 2 / 2  # two earlier keys, and half of the own square
    assert attention_size(1, 8, 8, 1, causal=True, window=3) == 8 * 3 - 3 * 3 / 2


def test_operators_with_a_curve_are_priced_by_it() -> None:
    plain = machine_of("cores = 2")
    given = machine_of(
        'curves = { swiglu_forward = curve([1], [0.5], "test"), swiglu_backward_input = curve([1], [2], "test") }'
    )
    flat = Curve((1.0, 1e12), (0.5, 0.5))
    machine = Machine(**{**given.__dict__, "curves": {**given.curves, "swiglu_forward": flat}})
    plan = lower(spec_of("cores = 2"), Strategy(data=2, micro_batches=2, stages=(2,)))
    segment = next(s for s in plan.segments if any(c.operator == "swiglu" for c in s.body))
    before, after = segment_seconds(plain, segment), segment_seconds(machine, segment)
    assert after.forward - before.forward == pytest.approx(0.5, rel=0.01)
    (call,) = (c for c in segment.body if c.operator == "swiglu")
    moved = sum(segment.types[n].bytes for n in (*call.operands, *call.results))
    assert after.backward_input - before.backward_input == pytest.approx(2 * moved, rel=0.01)


def test_instructions_and_collectives_with_a_curve_are_priced_by_it() -> None:
    curves = ", ".join(
        f'{name} = curve([1e3, 1e6], [1e-3, 1], "test")'
        for name in ("zero_grad", "all_reduce_2", "all_gather_2", "send")
    )
    spec = spec_of(f"curves = {{ {curves} }}")
    plan = lower(spec, Strategy(data=2, micro_batches=2, stages=(2,)))
    prices = Prices(plan)
    role = plan.roles[0]
    zeroed = [i for b in role.blocks for i in b.instructions if i.opcode == "zero_grad" and i.updates[0] == "g.l0"]
    elements = plan.bucket_table["l0"].elements
    assert prices.price(role, zeroed[0]) == pytest.approx(
        1e9 * 1e-6 * sum(4 * plan.bucket_table[u[2:]].elements if u.startswith("g.") else 8 for u in zeroed[0].updates),
        rel=1e-6,
    )
    reduced = [i for b in role.blocks for i in b.instructions if i.opcode == "reduce_grad" and "g.l0" in i.updates]
    assert prices.price(role, reduced[0]) == pytest.approx(4 * elements * 1e-6 * 1e9, rel=1e-6)
    machine = prices.machine
    assert transfer_seconds(machine, False, 1e5) == pytest.approx(0.1)
    assert collective_seconds(machine, "all_gather", Placement(4, 1, 4), 1e5) == pytest.approx(0.3)  # 3 parts, not 1


@pytest.mark.parametrize(
    ("curve", "told"),
    [
        ('curve([1, 2], [1], "x")', "as many seconds as sizes"),
        ('curve([2, 1], [1, 1], "x")', "rise"),
        ('curve([1, 2], [1, 0], "x")', "positive"),
        ('curve(1, 2, "x")', "two lists and a text"),
        ('curve([1, "a"], [1, 2], "x")', "made of numbers"),
    ],
)
def test_curves_that_are_none_are_refused(curve: str, told: str) -> None:
    with pytest.raises(TitanError, match="T214") as caught:
        spec_of(f"curves = {{ send = {curve} }}")
    assert told in str(caught.value)
