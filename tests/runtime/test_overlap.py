"""Gathers and fetches ahead of their use, across blocks: the same numbers, and nothing exposed that could be hidden."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from titan.compiler.lower import lower

from tests.equivalence.comparison import differences, plans, train_plan, train_reference, unproven
from tests.equivalence.configurations import Configuration, spec_of, strategy_of

torch.set_num_threads(1)
ACROSS = {
    "pipeline": Configuration(data=2, pipeline=2, zero=3),
    "split": Configuration(data=2, pipeline=2, zero=3, schedule="zero_bubble_h1", family="gpt2"),
    "pairs": Configuration(data=2, pipeline=2, zero=3, schedule="dualpipe", tied=True),
    "hybrid": Configuration(data=4, zero="3-half", offload="activations"),
}


@pytest.mark.parametrize("distance", [0, 2, 5])
@pytest.mark.parametrize("name", ACROSS)
def test_gathers_at_every_distance_train_the_same(name: str, distance: int) -> None:
    """Proven, equal to autograd; only the first element of an order has a block of gathers before it."""
    c = ACROSS[name]
    spec = spec_of(c)
    plan, single = plans(spec, replace(strategy_of(c), prefetch=distance))
    assert unproven(plan) == []
    one = train_plan(single, spec)
    assert differences(train_plan(plan, spec), train_reference(single, spec, one.initial)) == []
    alone = [call.block for role in plan.roles for call in role.order("train") if call.block.startswith("gather.F")]
    assert len(alone) == (len(plan.roles) if distance else 0)


def test_the_next_element_is_gathered_for_while_one_computes() -> None:
    """Every gather of a step but the first one of a rank is issued before the compute of another layer."""
    plan = lower(spec_of(ACROSS["split"]), strategy_of(ACROSS["split"]))
    for role in plan.roles:
        program = [(call.block, i) for _, _, call, i in role.instructions()]
        issued = {i.writes[0].rstrip("?"): n for n, (_, i) in enumerate(program) if i.opcode == "unshard" and i.reads}
        waited = {i.writes[0]: n for n, (_, i) in enumerate(program) if i.opcode == "wait" and i.writes}
        exposed = {name for name, n in issued.items() if not any(i.unit for _, i in program[n : waited[name]])}
        assert exposed == {name for name, n in issued.items() if program[n][0].startswith("gather.F.")}
        assert {name.rpartition(":")[2] for name in exposed} == {"0"}


def test_no_whole_gradient_waits_for_the_backward_to_weights() -> None:
    """Split backwards begin and scatter a gradient in one block: norms and biases have buckets of their own."""
    plan = lower(spec_of(ACROSS["split"]), strategy_of(ACROSS["split"]))
    assert any(b.name.endswith(".early") for b in plan.buckets)
    for block in (b for role in plan.roles for b in role.blocks):
        opened = [i.writes[0] for i in block.instructions if i.opcode == "open_grad"]
        scattered = [i.reads[0] for i in block.instructions if i.opcode == "reduce_grad" and i.reads]
        assert sorted(opened) == sorted(scattered)
