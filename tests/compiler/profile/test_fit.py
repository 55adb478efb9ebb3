"""From seconds to figures: constants that measurements were made from come back, and the written file is used."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from math import prod
from pathlib import Path

import pytest
from titan.compiler.cost.curves import Curve
from titan.compiler.cost.machine import Machine, read_machine
from titan.compiler.cost.simulate import simulate
from titan.compiler.lower import lower
from titan.compiler.plan.program import Plan
from titan.compiler.plan.segment import Call, Segment, parse_unit
from titan.compiler.profile.fit import (
    MOST,
    Key,
    Watched,
    fit_curve,
    fit_instructions,
    fit_operators,
    key_of,
    peak_rate,
    samples_of,
    shares_of,
)
from titan.compiler.profile.measure import Measured
from titan.compiler.profile.probes import Probe, plan_of
from titan.compiler.profile.write import cluster_text
from titan.compiler.spec.resolve import resolve
from titan.compiler.strategy import Strategy
from titan.grammar.formatter import format_source
from titan.grammar.parser import parse

LAUNCH, RATE, HALF, BANDWIDTH = 5e-6, 50e9, 16.0, 8e9
HOST, AROUND = 3e-6, 2e-6
WIDTHS = ((64, 192, 64), (128, 256, 128), (256, 768, 64))


def seconds_of(segment: Segment, call: Call) -> float:
    """A made-up machine: padded products at one rate, everything else at one bandwidth, both after a launch."""
    shapes = [segment.types[name].shape for name in call.operands]
    if call.operator == "linear":
        m, (n, k) = prod(shapes[0][:-1]), shapes[1]
        return LAUNCH + 2 * (m + HALF) * (n + HALF) * (k + HALF) / RATE
    return LAUNCH + 4 * sum(prod(s) for s in shapes) / BANDWIDTH


def phases(call: Call) -> Iterator[str]:
    yield "forward"
    if call.row.differentiable and call.operator != "embedding":
        yield "backward" if call.row.weight_with_input else "backward_input"
    if call.operator in ("linear", "embedding"):
        yield "backward_weight"


def watched(plan: Plan) -> Watched:
    operators: dict[Key, list[float]] = {}
    inside: dict[tuple[str, str], float] = {}
    for segment in plan.segments:
        for call in segment.body:
            for phase in phases(call):
                seconds = seconds_of(segment, call)
                operators[key_of(segment, call, phase)] = [seconds, seconds, 9 * seconds]  # once disturbed
                key = (segment.name, "forward" if phase == "forward" else "backward")
                inside[key] = inside.get(key, 0.0) + seconds + AROUND
    step = []
    for *_, i in plan.role_of(0).instructions("train"):
        own = inside[parse_unit(i.unit)[0], i.opcode] if i.opcode in ("forward", "backward") else 0.0
        step.append(HOST + own + (1e-3 if i.opcode == "optimizer_step" else 0.0))
    return Watched(operators, [step, step])


@pytest.fixture(scope="module")
def probed() -> list[tuple[Plan, list[Watched]]]:
    plans = [plan_of(Probe(hidden, ffn, 4, 256, sequence)) for hidden, ffn, sequence in WIDTHS]
    return [(plan, [watched(plan)]) for plan in plans]


def test_constants_of_operators_come_back(probed: list[tuple[Plan, list[Watched]]]) -> None:
    samples = [s for plan, ranks in probed for s in samples_of(plan, ranks)]
    found = fit_operators(samples)
    assert found.figures["matmul_half_dim"] == HALF
    for sample in samples:
        if sample.call.operator == "linear":
            m, (n, k) = prod(sample.operands[0].shape[:-1]), sample.operands[1].shape
            size = 2 * (m + HALF) * (n + HALF) * (k + HALF)
            assert found.curves[f"linear_{sample.phase}"](size) == pytest.approx(LAUNCH + size / RATE, rel=0.1)
    assert peak_rate(samples, "f32") == pytest.approx(RATE, rel=0.4)
    assert peak_rate(samples, "bf16") is None


def test_the_interpreters_own_time_comes_back(probed: list[tuple[Plan, list[Watched]]]) -> None:
    found = fit_instructions(probed)
    assert found.figures["instruction_seconds"] == pytest.approx(HOST)
    assert found.figures["call_seconds"] == pytest.approx(AROUND, rel=1e-6)
    assert found.curves["optimizer_step"](1e5) == pytest.approx(1e-3, rel=1e-3)


def test_what_operators_take_more_in_their_segment_comes_back_by_segment_and_pass() -> None:
    plan = plan_of(Probe(512, 1536, 4, 256, 512))
    once = watched(plan)
    order = [i for *_, i in plan.role_of(0).instructions("train")]
    longer = {"forward": 0.8, "backward": 1.2}
    step = [longer.get(i.opcode, 1.0) * t for i, t in zip(order, once.instructions[0], strict=True)]
    ranks = [Watched(once.operators, [step])]
    found = shares_of(plan, ranks, HOST, AROUND)
    assert {opcode for _, opcode in found} == {*longer}
    for (_, opcode), share in found.items():
        assert share == pytest.approx(longer[opcode], rel=0.05)
    plain = list(samples_of(plan, ranks))
    for one, other in zip(plain, samples_of(plan, ranks, {("s0", "backward"): 3.0}), strict=True):
        inside = one.phase != "forward" and one.call in plan.segment_table["s0"].body
        assert other.seconds == pytest.approx(one.seconds * (3.0 if inside else 1.0))


def test_curves_rise_and_stay_short() -> None:
    curve = fit_curve([(float(2**n), 1e-6 * 2 ** (n / 2) * (1.5 if n % 2 else 1.0)) for n in range(40)])
    assert len(curve.sizes) <= MOST
    assert list(curve.seconds) == sorted(curve.seconds)
    assert curve(2.0**20) == pytest.approx(1e-6 * 2**10, rel=0.5)


def test_the_written_file_is_imported_and_prices(tmp_path: Path) -> None:
    fast = Measured(
        "cpu", 4, 2, "2.0", 8 << 30, 3 << 20, 2e10, {"f32": 9e10}, {"call_seconds": 1e-6, "matmul_half_dim": 4.0},
        {"linear_forward": Curve((1e6, 1e9), (1e-5, 1e-2)), "all_gather_2": Curve((64.0, 1e6), (1e-4, 1e-3))},
    )  # fmt: skip
    slow = Measured(**{**fields_of(fast), "curves": {**fast.curves, "linear_forward": Curve((1e6, 1e9), (1e-3, 1.0))}})
    steps = []
    for name, found in (("fast", fast), ("slow", slow)):
        text = cluster_text(found, name, date(2026, 1, 2))
        (tmp_path / f"{name}.titan").write_text(text)
        assert format_source(text, name) == text
        machine, step = used(tmp_path, name)
        assert machine.curves["linear_forward"] == found.curves["linear_forward"]
        assert (machine.cores, machine.devices_per_node, machine.peak("f32")) == (2, 2, 9e10)
        assert machine.figures["call_seconds"] == 1e-6
        steps.append(step)
    assert steps[1] > 10 * steps[0]


def fields_of(found: Measured) -> dict[str, object]:
    return {name: getattr(found, name) for name in Measured.__slots__}


def used(folder: Path, module: str) -> tuple[Machine, float]:
    text = f"""import {module}
import models.tiny
model = tiny.llama
cluster = {module}.here with {{ devices_per_node = 2 }}
train {{ sequence = 64, global_batch = 4, precision = fp32, steps = 4, optimizer = adamw {{ learning_rate = 1e-3 }}
    data = synthetic(256) }}
"""
    spec = resolve(parse(text, str(folder / "spec.titan")), folder)
    plan = lower(spec, Strategy(data=2, micro_batches=2, stages=(4,)))
    return read_machine(spec.cluster.model_dump()), simulate(plan).seconds


def test_a_file_may_be_called_like_the_part_that_it_gives(tmp_path: Path) -> None:
    found = Measured(
        "cpu", 2, 2, "2.0", 8 << 30, 1 << 20, 2e10, {}, {"call_seconds": 0.0}, {"send": Curve((1.0,), (1e-4,))}
    )
    (tmp_path / "cluster.titan").write_text(cluster_text(found, "cluster", date(2026, 1, 2)))
    assert used(tmp_path, "cluster")[0].cores == 2
