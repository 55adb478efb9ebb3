"""Idle time of every schedule in the plan itself, by the simulator of plans."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest
from titan.compiler.cost.prices import Prices
from titan.compiler.cost.simulate import simulate
from titan.compiler.cost.timeline import Timeline
from titan.compiler.lower import lower
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.program import Plan, Role
from titan.compiler.plan.segment import parse_unit
from titan.compiler.schedules.order import Times
from titan.compiler.schedules.registry import SCHEDULES
from titan.compiler.strategy import Strategy

from tests.compiler.schedules.small import small_spec

UNIT = 12_000  # nanoseconds of a forward of a rank's whole share
TIMES = Times(UNIT, UNIT, UNIT)
CASES = [
    (name, ranks, m)
    for name, row in SCHEDULES.items()
    for ranks, counts in ((2, (2, 5, 8)), (4, (4, 8, 13)), (8, (16,)))
    for m in counts
    if row.legal(ranks, m) and name != "solved"
]


class UnitPrices(Prices):
    """F = I = W for every layer, nothing else takes time."""

    def price(self, role: Role, instruction: Instruction) -> int:
        factor = {"forward": 1, "backward": 2, "backward_input": 1, "backward_weight": 1}.get(instruction.opcode, 0)
        if not factor or parse_unit(instruction.unit)[1] is None:
            return 0
        layers = len({segment.name for segment in self.plan.segments if segment.parameters[:1] and
                      segment.parameters[0].startswith(".")})  # fmt: skip
        strategy = self.plan.setting("strategy")
        return factor * UNIT // (layers * len(strategy["stages"]) // strategy["pipeline"])


@lru_cache(maxsize=64)
def plan_of(name: str, ranks: int, micro_batches: int) -> Plan:
    """One layer per chunk."""
    row = SCHEDULES[name]
    chunks = ranks * row.chunks
    spec = small_spec(layers=chunks, batch=micro_batches, devices=ranks)
    strategy = Strategy(pipeline=ranks, micro_batches=micro_batches, schedule=name, stages=(1,) * chunks)
    return lower(spec, strategy)


def timeline(name: str, ranks: int, micro_batches: int) -> Timeline:
    plan = plan_of(name, ranks, micro_batches)
    return simulate(plan, prices=UnitPrices(plan))


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), CASES)
def test_idle_time_in_the_plan_is_the_closed_form(name: str, ranks: int, micro_batches: int) -> None:
    found, row = timeline(name, ranks, micro_batches), SCHEDULES[name]
    idle = found.step - 3 * UNIT * micro_batches
    form = row.bubble(ranks, TIMES, row.chunks)
    if name in ("v_half", "v_min"):
        assert 0 < idle <= form + 1
        return
    if name.startswith("dualpipe"):
        # the form takes a pair for one piece; with nothing to overlap the plan sends the gradient half-way through it
        assert idle == pytest.approx(form / 2, abs=1)
        return
    assert idle == pytest.approx(form, abs=1)
    assert found.bubble_fraction == pytest.approx(form / found.step, abs=1e-4)
    if name in ("zero_bubble_h2", "zero_bubble_v") and micro_batches >= 2 * ranks - 1:
        assert found.span_bubble_fraction == 0  # within every rank's span; the flush bubble above is not zero


def test_the_same_figures_as_published() -> None:
    wanted = {"one_f_one_b": 27.3, "interleaved": 15.8, "zero_bubble_h1": 11.1, "zero_bubble_v": 5.9}
    for name, percent in wanted.items():
        assert round(100 * timeline(name, 4, 8).bubble_fraction, 1) == percent


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), [("zero_bubble_h2", 4, 8), ("zero_bubble_v", 4, 16)])
def test_no_bubble_is_left_between_steps_that_do_not_wait_for_the_norm(
    name: str, ranks: int, micro_batches: int
) -> None:
    """In the steady state a further step takes the work of one rank and no more, where ranks end in staggered order."""
    chunks = ranks * SCHEDULES[name].chunks
    spec = small_spec(layers=chunks, batch=micro_batches, devices=ranks)
    strategy = Strategy(pipeline=ranks, micro_batches=micro_batches, schedule=name, stages=(1,) * chunks)
    late = lower(spec, replace(strategy, late_check=True))
    found = simulate(late, prices=UnitPrices(late))
    assert found.step == 3 * UNIT * micro_batches
    assert found.bubble_fraction == found.span_bubble_fraction == 0
    assert timeline(name, ranks, micro_batches).step > found.step
