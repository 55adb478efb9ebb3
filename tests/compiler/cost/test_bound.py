"""The lower bound of the step time against simulated plans of every kind."""

from __future__ import annotations

from pathlib import Path

import pytest
from titan.compiler.cost.bound import lower_bound
from titan.compiler.cost.machine import read_machine
from titan.compiler.cost.mfu import model_flops
from titan.compiler.cost.simulate import simulate
from titan.compiler.lower import lower
from titan.compiler.search.candidates import Candidate
from titan.compiler.search.orders import finished
from titan.compiler.search.search import estimator_of, memory_limit

from tests.benchmarks.search import every
from tests.compiler.search.specs import SMALL, write

MOE = SMALL.replace("12 * dense { ffn = 2816 }", "4 * moe { experts = 8, top_k = 2, shared = 1, ffn = 1024 }")
SHORT = SMALL.replace("12 *", "4 *")


@pytest.mark.parametrize("model", [SHORT, MOE])
def test_no_simulated_plan_is_faster(tmp_path: Path, model: str) -> None:
    spec = write(tmp_path, "zero <= 3", model=model, devices=4, batch=8)
    estimator, limit = estimator_of(spec), memory_limit(spec)
    strategies = list(dict.fromkeys(every(spec)))
    assert len(strategies) > 200
    bounds = set()
    for s in strategies[:: len(strategies) // 20]:
        plan = lower(spec, finished(Candidate(s, estimator.estimate(s)), estimator, limit))
        bounds.add(lower_bound(plan, estimator.machine))
        assert simulate(plan, estimator.machine).seconds >= max(bounds)
    assert len(bounds) == 1  # of the problem, whatever the layout


def test_is_at_least_the_roofline(tmp_path: Path) -> None:
    """Every model FLOP at the rate of large products: kernels of real shapes take longer, and a plan of one device that
    takes the whole batch at once takes little more than the bound."""
    spec = write(tmp_path, "pipeline = 1", devices=1, batch=8, model=SHORT)
    estimator, limit = estimator_of(spec), memory_limit(spec)
    strategies = [s for s in every(spec) if s.micro_batch == 8 and s.recompute == "none"]
    plan = lower(spec, finished(Candidate(strategies[0], estimator.estimate(strategies[0])), estimator, limit))
    machine = read_machine(plan.setting("cluster"))
    bound = lower_bound(plan, machine)
    flops = model_flops(plan.setting("model"), 2048).exact * 8 * 2048
    assert flops / machine.rate("bf16", "matmul") < bound
    assert bound <= simulate(plan, machine).seconds <= 1.1 * bound
