"""The memory budget that `titan explain` shows, against the plan's own figures."""

from __future__ import annotations

import re
from typing import Any

import pytest
from titan.compiler.cost.memory import memory_ledger
from titan.compiler.plan.sizes import liveness
from titan.compiler.report.budget import budget_lines

from tests.runtime.test_zero import plan_of, spec_of


def lines(**choices: Any) -> list[str]:
    return list(budget_lines(plan_of(spec_of("bf16", vocab=4096, hidden=256), 4, **choices)))


@pytest.mark.parametrize(
    ("zero", "words"), [(0, ()), (1, ("optimizer",)), (3, ("optimizer", "gradients", "parameters"))]
)
def test_each_sharded_component_is_told_with_what_it_saves(zero: int, words: tuple[str, ...]) -> None:
    found = [line.split()[0] for line in lines(zero=zero) if " sharded over 4 ranks save " in line]
    assert found == list(words)


def test_savings_are_what_whole_buffers_would_take_more() -> None:
    """Against the plan that shards nothing."""
    spec = spec_of("bf16", vocab=4096, hidden=256)
    whole, plan = (memory_ledger(plan_of(spec, 4, zero=zero)).worst.components for zero in (0, 3))
    shown = dict(re.findall(r"  (\w+)(?: state)? sharded over 4 ranks save ([\d.]+) MiB", "\n".join(lines(zero=3))))
    for name, key in (("optimizer", "optimizer"), ("gradients", "gradients"), ("parameters", "parameters")):
        assert float(shown[name]) == pytest.approx((whole[key] - plan[key]) / 2**20, abs=0.051)


@pytest.mark.parametrize("tier", ["selective", "full"])
def test_recompute_is_told_with_what_it_saves_and_its_cost(tier: str) -> None:
    """Against the registers that are left after the forward of the one micro-batch in flight, with and without."""
    spec = spec_of("bf16", vocab=4096, hidden=256)
    left = []
    for recompute in ("none", tier):
        plan = plan_of(spec, 4, recompute=recompute)
        calls = [call.block for call in plan.roles[0].order("train")]
        left.append(liveness(plan, plan.roles[0]).curve[calls.index("F.c0")])
    (line,) = (line for line in lines(recompute=tier) if "recompute keeps" in line)
    shown, more = re.findall(r"keeps ([\d.]+) MiB less of 1 micro-batch in flight and runs ([\d.]+)% more", line)[0]
    assert float(shown) == pytest.approx((left[0] - left[1]) / 2**20, abs=0.051) and 0 < float(more) < 40
    assert not any("recompute" in line for line in lines())
