"""`verify --execute`: right plans agree with autograd, plans with a mistake do not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from titan.compiler.lower import lower
from titan.compiler.pipeline import compile_spec
from titan.compiler.plan.program import Block, Plan
from titan.compiler.shrink import shrink
from titan.grammar.diagnostics import TitanError
from titan.runtime.execute import execute_and_compare

from tests.runtime.small_runs import make_plan, write_spec

torch.set_num_threads(1)


@pytest.mark.parametrize("parallel", ["pipeline = 2", "tensor = 2", "data = 2\n    zero = 1", "context = 2"])
def test_a_shrunk_plan_equals_autograd(parallel: str, tmp_path: Path) -> None:
    compiled = compile_spec(write_spec(tmp_path, parallel))
    comparisons = execute_and_compare(lower(*shrink(compiled.spec, compiled.result.strategy)))
    assert [str(c) for c in comparisons if not c.ok] == []
    names = {c.name for c in comparisons}
    assert {"loss", "gradient norm", "gradient of embed.weight", "updated layers.0.attn.q.weight"} <= names


def without(plan: Plan, opcode: str) -> Plan:
    """The plan without every instruction of an opcode, and without what waits for it."""

    def strip(block: Block) -> Block:
        gone = {w for i in block.instructions if i.opcode == opcode for w in i.writes}
        kept = tuple(i for i in block.instructions if i.opcode != opcode and not gone & set(i.reads))
        return dataclasses.replace(block, instructions=kept)

    roles = tuple(dataclasses.replace(role, blocks=tuple(map(strip, role.blocks))) for role in plan.roles)
    return dataclasses.replace(plan, roles=roles)


def test_a_forgotten_gradient_clearing_is_seen_in_the_second_step(tmp_path: Path) -> None:
    wrong = without(make_plan(tmp_path, precision="fp64"), "zero_grad")
    steps = {c.step for c in execute_and_compare(wrong) if not c.ok}
    assert steps == {1}


def test_a_forgotten_gradient_sum_is_seen(tmp_path: Path) -> None:
    wrong = without(make_plan(tmp_path, "data = 2", precision="fp64"), "reduce_grad")
    with pytest.raises(TitanError) as found:
        execute_and_compare(wrong)
    assert found.value.diagnostics[0].code in ("T610", "T613")  # the token is never made, or the copies differ


def test_only_float64_is_compared(tmp_path: Path) -> None:
    with pytest.raises(TitanError) as refused:
        execute_and_compare(make_plan(tmp_path))
    assert refused.value.diagnostics[0].code == "T605"
