"""Ranks that share cores, against schedules worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from titan.compiler.cost.machine import read_machine
from titan.compiler.cost.shared_cores import Loads
from titan.compiler.cost.simulate import simulate
from titan.compiler.lower import lower
from titan.compiler.strategy import Strategy

from tests.compiler.cost.test_curves import spec_of


def test_time_is_stretched_where_more_work_than_cores() -> None:
    loads = Loads(2)
    for start, stop in ((0, 100), (0, 100), (50, 150), (50, 80)):
        loads.add(start, stop, 1.0)
    clock = loads.clock()
    assert clock(50) == 50  # two ranks on two cores
    assert clock(80) == 50 + 60  # four
    assert clock(100) == 110 + 30  # three
    assert clock(150) == 140 + 50  # one
    assert clock(1000) == 1040


def test_shares_that_fit_change_nothing() -> None:
    loads = Loads(4)
    loads.add(10, 20, 3.5)
    assert [loads.clock()(t) for t in (0, 15, 20, 99)] == [0, 15, 20, 99]


@pytest.mark.parametrize("choices", [{"data": 2}, {"pipeline": 2}], ids=str)
def test_a_step_on_fewer_cores_takes_the_work_of_all_ranks_longer(choices: dict[str, int]) -> None:
    """Communication that costs nothing: on one core the step is the work of all ranks in a row."""
    spec = spec_of("cores = 0")
    stages = (1, 1) if "pipeline" in choices else (2,)
    plan = lower(spec, Strategy(**choices, micro_batches=4 // choices.get("data", 1), stages=stages))
    machine = read_machine(spec.cluster.model_dump())
    free = replace(machine.intra, bandwidth=1e30, latency=0.0)
    alone = replace(machine, intra=free, figures={**machine.figures, "overlap_slowdown": 1.0})
    many, one = (simulate(plan, replace(alone, cores=cores)) for cores in (8, 1))
    own = simulate(plan, alone)
    assert many.step == own.step
    ranks = plan.mesh.world_size // len(plan.roles)
    assert one.step == pytest.approx(sum(r.busy for r in own.roles) * ranks, rel=1e-3)
