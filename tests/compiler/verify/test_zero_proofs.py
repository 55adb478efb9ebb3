"""Broken ZeRO plans are refused by the proof that stands for the rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.program import Block, Plan
from titan.compiler.verify.proofs import verify

from tests.runtime.test_zero import plan_of, spec_of

Change = Callable[[list[Instruction]], list[Instruction]]


def broken(plan: Plan, name: str, change: Change) -> set[str]:
    """Codes found when the instructions of the blocks of a name are changed."""
    role = plan.roles[0]
    blocks, changed = [], False
    for block in role.blocks:
        after = tuple(change(list(block.instructions))) if block.name == name else block.instructions
        changed = changed or after != block.instructions
        blocks.append(Block(block.name, block.parameters, after))
    assert changed, "nothing was changed"
    found = verify(replace(plan, roles=(replace(role, blocks=tuple(blocks)),)))
    return {finding.code for proof in found.values() for finding in proof.findings}


def at(instructions: list[Instruction], opcode: str, word: str) -> int:
    return next(
        n
        for n, i in enumerate(instructions)
        if i.opcode == opcode and any(word in name for name in (*i.writes, *i.reads, *i.updates, i.unit))
    )


def without(opcode: str, word: str) -> Change:
    def change(block: list[Instruction]) -> list[Instruction]:
        del block[at(block, opcode, word)]
        return block

    return change


def with_other(opcode: str, word: str, **fields: object) -> Change:
    def change(block: list[Instruction]) -> list[Instruction]:
        n = at(block, opcode, word)
        block[n] = replace(block[n], **fields)  # type: ignore[arg-type]
        return block

    return change


def never_scattered(block: list[Instruction]) -> list[Instruction]:
    return without("wait", "u.dw.l1")(without("reduce_grad", "dw.l1")(block))


def scattered_twice(block: list[Instruction]) -> list[Instruction]:
    n = at(block, "wait", "u.dw.l1")
    issue = block[at(block, "reduce_grad", "dw.l1")]
    again = replace(issue, writes=("u.dw.l1.2:i?",))
    return [*block[: n + 1], again, Instruction("wait", (), ("u.dw.l1.2:i?",)), *block[n + 1 :]]


def scattered_before_the_last_contribution(block: list[Instruction]) -> list[Instruction]:
    issue = block.pop(at(block, "reduce_grad", "dw.l1"))
    wait = block.pop(at(block, "wait", "u.dw.l1"))
    last = max(n for n, i in enumerate(block) if i.unit and "dw.l1:i" in i.updates)
    return [*block[:last], issue, wait, *block[last:]]


def of_another_layer(block: list[Instruction]) -> list[Instruction]:
    n = next(k for k, i in enumerate(block) if i.opcode == "forward" and "w.l1:i" in i.reads)
    reads = tuple("w.l2:i" if name == "w.l1:i" else name for name in block[n].reads)
    block[n] = replace(block[n], reads=reads)
    issue, wait = (block.pop(at(block, opcode, "w.l2")) for opcode in ("unshard", "wait"))
    return [issue, wait, *block]


def the_shard_itself(block: list[Instruction]) -> list[Instruction]:
    n = next(k for k, i in enumerate(block) if i.opcode == "forward" and "w.l1:i" in i.reads)
    block[n] = replace(block[n], reads=tuple("p.l1" if name == "w.l1:i" else name for name in block[n].reads))
    return block


@pytest.mark.parametrize(
    ("block", "change", "code"),
    [
        ("B.c0", never_scattered, "T743"),
        ("B.c0", scattered_twice, "T743"),
        ("B.c0", scattered_before_the_last_contribution, "T743"),
        ("B.c0", with_other("reduce_grad", "dw.l1", group="data"), "T743"),
        ("B.c0", with_other("reduce_grad", "dw.l1", updates=("g.l2",)), "T743"),
        ("B.c0", with_other("reduce_grad", "dw.l1", attributes=(("mode", "all_reduce"),)), "T743"),
        ("B.c0", without("open_grad", "dw.l1"), "T710"),
        ("F.c0.to_B0", with_other("unshard", "w.l1", reads=("p.l2",)), "T746"),
        ("F.c0.to_B0", with_other("unshard", "w.l1", group="data.replicate"), "T746"),
        ("F.c0.to_B0", without("wait", "w.l1"), "T714"),
        ("F.c0.to_B0", without("unshard", "r.w.head:k"), "T714"),
        ("B.c0.to_F0", with_other("unshard", "w.embed:k", writes=("w.embed:i?",)), "T714"),
        ("F.c0.to_B0", with_other("unshard", "r.w.head:k", reads=("p.embed",)), "T746"),
        ("F.c0.to_B0", of_another_layer, "T761"),
        ("F.c0.to_B0", the_shard_itself, "T761"),
        ("reduce.l1", without("reduce_grad", "g.l1"), "T743"),
        ("reduce.l1", with_other("reduce_grad", "g.l1", group="data.shard"), "T743"),
        ("reduce.l1", with_other("reduce_grad", "g.l1", group="data"), "T743"),
    ],
)
def test_a_broken_plan_is_refused(block: str, change: Change, code: str) -> None:
    plan = plan_of(spec_of("bf16"), 4, zero=3, shard=2)
    assert {f.code for proof in verify(plan).values() for f in proof.findings} == set()
    assert code in broken(plan, block, change)


@pytest.mark.parametrize(
    ("block", "change", "code"),
    [
        ("B.c0.last", without("reduce_grad", "u.g.l1"), "T743"),
        ("B.c0.to_F0", lambda block: [*block, Instruction("zero_grad", updates=("g.l1",))], "T745"),
        (
            "step.l1",
            lambda block: [*block, Instruction("unshard", ("u.p.l1?",), (), ("p.l1",), "", "data", "x")],
            "T746",
        ),
    ],
)
def test_a_broken_plan_that_reduces_once_is_refused(block: str, change: Change, code: str) -> None:
    plan = plan_of(spec_of("bf16"), 2, zero=3, reduce="once")
    assert code in broken(plan, block, change)
