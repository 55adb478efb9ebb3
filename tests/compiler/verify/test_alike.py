"""Roles that are alike are proven once, and none that is not is taken for another."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from titan.compiler.lower import lower
from titan.compiler.plan.alike import alone
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.listing import Renamed, Renaming
from titan.compiler.plan.program import BlockCall, Plan, Role
from titan.compiler.plan.sizes import Sizes, memory_by_component
from titan.compiler.spec.schema import Spec
from titan.compiler.strategy import Strategy
from titan.compiler.verify.findings import Finding
from titan.compiler.verify.proofs import PROOFS, verify

from tests.benchmarks import mutation_headers, mutation_values  # noqa: F401  (their operators join the table)
from tests.benchmarks.mutation import OPERATORS, Mutant, mutants, with_block, with_role
from tests.compiler.verify.tiny import model, spec

STAGES, BROKEN = 6, 3  # the broken role is neither the first nor the last of those that are alike
EACH = 2  # mutants of each kind
WAYS: dict[str, dict[str, object]] = {
    "late": {"data": 2, "zero": 1, "late_check": True},
    "split": {"schedule": "zero_bubble_h1", "tensor": 2, "sequence_parallel": True},
    "v": {"schedule": "zero_bubble_v", "late_check": True},
    "sharded": {"data": 2, "zero": 3},
    "full": {"recompute": "full", "offload": "activations"},
}


@cache
def plan(name: str) -> Plan:
    return lower(*_made(name))


def _made(name: str) -> tuple[Spec, Strategy]:
    fields = {"pipeline": STAGES, "micro_batches": 2 * STAGES, **WAYS[name]}
    chunks = 2 if name == "v" else 1
    strategy = Strategy(stages=(1,) * STAGES * chunks, **fields)  # type: ignore[arg-type]
    batch = strategy.data * strategy.micro_batches
    found = model("llama", STAGES * chunks, 4, 16, False)
    return spec(found, strategy.world_size, batch), strategy


def each_alone(found: Plan) -> Plan:
    """The same plan, of which no proof is shown that roles are alike."""
    found = replace(found)
    found.__dict__["alike"] = alone(found)
    return found


def firsts(found: Plan) -> list[int]:
    return [like.first.pipeline for like in found.alike]


def findings(found: Plan) -> dict[str, tuple[Finding, ...]]:
    return {name: proof.findings for name, proof in verify(found).items()}


def changed(found: Plan, change: Callable[[Instruction], Instruction | None]) -> Plan:
    """One instruction of the broken role otherwise: the first one of which `change` makes another."""
    role = found.roles[BROKEN]
    for block in role.blocks:
        for index, instruction in enumerate(block.instructions):
            new = change(instruction)
            if new is not None:
                listed = block.instructions
                return with_block(found, role, block, (*listed[:index], new, *listed[index + 1 :]))
    raise AssertionError("there is no such instruction")


@pytest.mark.parametrize("name", WAYS)
def test_roles_between_the_ends_are_alike(name: str) -> None:
    found = firsts(plan(name))
    assert found[0] == 0 and found[-1] == STAGES - 1
    assert found[BROKEN] < BROKEN, found
    assert findings(plan(name)) == findings(each_alone(plan(name))) == {proof: () for proof, _ in PROOFS}


@pytest.mark.parametrize("name", WAYS)
def test_like_roles_need_the_same_memory(name: str) -> None:
    found = plan(name)
    sizes, apart = Sizes(found), Sizes(each_alone(found))
    for role in found.roles:
        assert memory_by_component(found, role, sizes) == memory_by_component(found, role, apart)


CHANGES: dict[str, Callable[[Instruction], Instruction | None]] = {
    "opcode": lambda i: replace(i, opcode="backward") if i.opcode == "forward" else None,
    "group": lambda i: replace(i, group="tensor") if i.opcode == "reduce_grad" else None,
    "stream": lambda i: replace(i, stream="other") if i.opcode == "send" else None,
    "attribute": lambda i: replace(i, attributes=(("peer", 2),)) if i.attribute("peer") == 1 else None,
    "layer": lambda i: replace(i, reads=("x.l0:i",)) if i.opcode == "send" else None,
    "order of operands": lambda i: replace(i, reads=i.reads[::-1]) if len(set(i.reads)) > 1 else None,
    "unit": lambda i: replace(i, unit=f"{i.unit.partition('.l')[0]}.l0") if i.opcode == "forward" else None,
    "how a layer is written": lambda i: (
        replace(i, writes=(i.writes[0].replace(".l", ".l0"),)) if i.opcode == "recv" else None
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_instruction_makes_a_role_unlike(name: str) -> None:
    broken = changed(plan("late"), CHANGES[name])
    assert firsts(broken)[BROKEN] == BROKEN
    assert findings(broken) == findings(each_alone(broken))


@pytest.mark.parametrize("name", WAYS)
def test_renamings_of_one_list_are_not_written_out(name: str) -> None:
    found = lower(*_made(name))
    assert firsts(found)[BROKEN] < BROKEN
    listed = [b.instructions for role in found.roles for b in role.blocks if isinstance(b.instructions, Renamed)]
    assert listed and not any("whole" in vars(renamed) for renamed in listed)


@pytest.mark.parametrize("start", ("recv.x", "F.", "step."))
def test_a_block_in_other_layers_than_the_rest_makes_a_role_unlike(start: str) -> None:
    """It is a renaming of the list that the other roles have there, which alone does not make it theirs."""
    found = plan("late")
    role = found.roles[BROKEN]
    block = next(b for b in role.blocks if b.name.startswith(start))
    assert isinstance(block.instructions, Renamed)
    moved = Renamed(block.instructions.of, Renaming.by(0))
    blocks = tuple(replace(b, instructions=moved) if b is block else b for b in role.blocks)
    broken = with_role(found, replace(role, blocks=blocks))
    assert firsts(broken)[BROKEN] == BROKEN
    assert findings(broken) == findings(each_alone(broken))


def _of_layer(found: Plan, name: str) -> bool:
    return f"l{BROKEN}." in f"{name}." or f"layers.{BROKEN}." in name


def test_another_parameter_bucket_or_buffer_makes_a_role_unlike() -> None:
    found = plan("late")
    ways = [
        replace(
            found, parameters=tuple(replace(p, rows=0) if _of_layer(found, p.name) else p for p in found.parameters)
        ),
        replace(
            found, buckets=tuple(replace(b, elements=1 << 20) if _of_layer(found, b.name) else b for b in found.buckets)
        ),
        replace(found, buckets=tuple(replace(b, homes=(0,)) if _of_layer(found, b.name) else b for b in found.buckets)),
        replace(found, parameters=tuple(p for p in found.parameters if not _of_layer(found, p.name))),
        with_role(
            found,
            replace(found.roles[BROKEN], buffers=tuple(replace(b, elements=1) for b in found.roles[BROKEN].buffers)),
        ),
        with_role(found, replace(found.roles[BROKEN], layers=((0,),))),
    ]
    for broken in ways:
        assert firsts(broken)[BROKEN] == BROKEN
        assert {name for name, listed in findings(broken).items() if listed}
        assert findings(broken) == findings(each_alone(broken))


def test_what_belongs_to_no_layer_makes_a_role_stand_for_itself() -> None:
    found = plan("late")
    first = found.buckets[0]
    assert first.name == "embed" and first.homes == (0,)
    broken = replace(found, buckets=(replace(first, homes=(0, BROKEN)), *found.buckets[1:]))
    assert firsts(broken)[BROKEN] == BROKEN
    assert findings(broken) == findings(each_alone(broken))


def moved(calls: tuple[BlockCall, ...], dice: random.Random) -> tuple[BlockCall, ...]:
    """One call left out, done twice, done for another micro-batch, or done at another time."""
    n, m = dice.randrange(len(calls)), dice.randrange(len(calls))
    way = dice.choice(("drop", "twice", "batch", "swap"))
    listed = list(calls)
    if way == "drop":
        del listed[n]
    elif way == "twice":
        listed.insert(m, calls[n])
    elif way == "swap":
        listed[n], listed[m] = listed[m], listed[n]
    else:
        listed[n] = calls[n]._replace(arguments=tuple((a + 1) % STAGES for a in calls[n].arguments))
    return tuple(listed)


def with_order(found: Plan, role: Role, order: str, calls: tuple[BlockCall, ...]) -> Plan:
    return with_role(found, replace(role, orders=tuple((n, calls if n == order else c) for n, c in role.orders)))


@pytest.mark.parametrize("name", WAYS)
def test_an_order_that_is_broken_in_one_role_is_found(name: str) -> None:
    dice, found = random.Random(name), plan(name)
    refused = 0
    for _ in range(40):
        role = found.roles[dice.choice((BROKEN, BROKEN, STAGES - 1))]
        order = dice.choice([order for order, calls in role.orders if calls])
        broken = with_order(found, role, order, moved(role.order(order), dice))
        mine, all_roles = findings(broken), findings(each_alone(broken))
        assert mine == all_roles, order
        refused += any(mine.values())
    assert refused > 20


def test_a_body_that_is_broken_alone_is_found() -> None:
    found = plan("late")
    role = found.roles[BROKEN]
    calls = role.order("body")
    broken = with_order(found, role, "body", (calls[1], calls[0], *calls[2:]))
    assert {name for name, listed in findings(broken).items() if listed} & {"registers", "gradients"}
    assert "body" in " ".join(f.message for listed in findings(broken).values() for f in listed)


@pytest.mark.parametrize("name", WAYS)
def test_mutants_are_refused_as_if_no_roles_were_alike(name: str) -> None:
    dice, found = random.Random(name), plan(name)
    made: list[Mutant] = []
    for operator in OPERATORS:
        listed = [m for m in mutants(found, operator) if not m.where[:1].isdigit() or m.where.startswith(f"{BROKEN}/")]
        made += dice.sample(listed, min(EACH, len(listed)))
    refused = 0
    for mutant in made:
        broken = mutant.make()
        mine = findings(broken)
        assert mine == findings(each_alone(broken)), (mutant.operator, mutant.where)
        refused += any(mine.values())
    assert refused > len(made) // 2
