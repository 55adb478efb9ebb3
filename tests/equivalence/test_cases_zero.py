"""Situations from public reports about sharding under pipelines; each test bears the id of its case."""

from __future__ import annotations

import torch
from titan.compiler.cost.simulate import simulate
from titan.compiler.lower import lower
from titan.compiler.plan.program import Plan
from titan.compiler.spec.legality import check_pins

from tests.compiler.spec.writing import resolved, spec_text
from tests.equivalence import comparison
from tests.equivalence.configurations import Configuration, spec_of, strategy_of

torch.set_num_threads(1)
SHARDED = Configuration(pipeline=2, data=2, zero=2)


def scatters(plan: Plan) -> int:
    """Reductions of a gradient bucket that a rank issues in a step."""
    role = plan.roles[0]
    sums = {b.name: sum(i.opcode == "reduce_grad" for i in b.instructions) for b in role.blocks}
    return sum(sums[call.block] for call in role.order("train"))


def test_S_ZPP_01_sharded_gradients_survive_a_pipeline() -> None:
    """ZeRO-2 with two stages is accepted: gradients are scattered after each micro-batch, which costs, and it trains
    as one process does."""
    spec = resolved(spec_text("zero = 2, pipeline = 2, tensor = 1, micro_batch = 4", devices=4, batch="32"))
    assert check_pins(spec) == ()
    spec, strategy = spec_of(SHARDED), strategy_of(SHARDED)
    once = strategy_of(Configuration(pipeline=2, data=2, zero=1))
    each, whole = lower(spec, strategy), lower(spec, once)
    assert scatters(each) >= scatters(whole) + strategy.micro_batches - 1
    assert simulate(each).seconds > simulate(whole).seconds
    assert comparison.unproven(each) == []
    assert comparison.mismatches(SHARDED) == []
