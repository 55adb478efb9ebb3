"""What is proven of fewer layers is what is proven of all."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.listing import Listing, Stretch, stretches
from titan.compiler.plan.program import Plan
from titan.compiler.verify.fewer import fewer
from titan.compiler.verify.proofs import verify

from tests.compiler.passes.test_repeat import WAYS, plan

MUTANTS = 40


def written(found: Plan) -> Plan:
    """The same plan with every instruction in its blocks."""
    roles = tuple(
        replace(role, blocks=tuple(replace(b, instructions=tuple(b.instructions)) for b in role.blocks))
        for role in found.roles
    )
    return replace(found, roles=roles)


def length(found: Plan) -> int:
    return sum(len(block.instructions) for role in found.roles for block in role.blocks)


@pytest.mark.parametrize("name", WAYS)
def test_fewer_layers_are_a_plan(name: str) -> None:
    whole = plan(name)
    less = fewer(whole)
    assert fewer(written(whole)) is None
    if less is not None:
        assert length(less) < length(whole)
        assert {proof: found.findings[:1] for proof, found in verify(less).items() if not found.ok} == {}
    assert {proof: found.ok for proof, found in verify(whole).items()} == {
        proof: found.ok for proof, found in verify(written(whole)).items()
    }


def test_most_plans_have_fewer() -> None:
    assert sum(fewer(plan(name)) is not None for name in WAYS) >= len(WAYS) - 2


def changed(instructions: list[Instruction], dice: random.Random) -> list[Instruction]:
    """One instruction dropped, done twice, done later, or with another operand."""
    n = dice.randrange(len(instructions) - 1)
    way = dice.choice(("drop", "twice", "later", "operand", "layer"))
    if way == "drop":
        return [*instructions[:n], *instructions[n + 1 :]]
    if way == "twice":
        return [*instructions[: n + 1], *instructions[n:]]
    if way == "later":
        m = min(n + dice.randrange(1, 6), len(instructions) - 1)
        return [*instructions[:n], *instructions[n + 1 : m + 1], instructions[n], *instructions[m + 1 :]]
    i, other = instructions[n], dice.choice([i for i in instructions if i.reads])
    if not i.reads:
        return [*instructions[:n], *instructions[n + 1 :]]
    read = dice.choice(other.reads)
    if way == "layer":  # of a layer that is nearby or far
        head, _, layer = i.reads[0].partition(".l")
        digits = layer.partition(":")[0]
        read = f"{head}.l{max(int(digits) + dice.choice((-9, -2, -1, 1, 2, 9)), 0)}:i" if digits.isdigit() else read
    place = dice.randrange(len(i.reads))
    reads = (*i.reads[:place], read, *i.reads[place + 1 :])
    return [*instructions[:n], replace(i, reads=reads), *instructions[n + 1 :]]


def mutant(found: Plan, dice: random.Random) -> Plan:
    """A change in a stretch of a block: of one that is repeated, in all of its layers."""
    role = dice.choice(found.roles)
    listed = [(b, stretches(b.instructions)) for b in role.blocks if isinstance(b.instructions, Listing)]
    block, parts = dice.choice([(b, p) for b, p in listed if any(len(s.instructions) > 1 for s in p)])
    chosen = list(parts)
    n = dice.choice([n for n, stretch in enumerate(chosen) if len(stretch.instructions) > 1])
    after = tuple(changed(list(chosen[n].instructions), dice))
    chosen[n] = Stretch(after, chosen[n].times, chosen[n].step)
    other = replace(block, instructions=Listing(tuple(chosen)))
    blocks = tuple(other if b is block else b for b in role.blocks)
    return replace(found, roles=tuple(replace(r, blocks=blocks) if r is role else r for r in found.roles))


@pytest.mark.parametrize("name", ["tensor", "zero 1", "zero 3", "ring", "mixed", "stages"])
def test_a_mistake_is_found_in_fewer_layers_too(name: str) -> None:
    dice, whole = random.Random(name), plan(name)
    refused = 0
    for _ in range(MUTANTS):
        broken = mutant(whole, dice)
        mine, all_layers = verify(broken), verify(written(broken))
        assert {k: p.ok for k, p in mine.items()} == {k: p.ok for k, p in all_layers.items()}
        refused += not all(proof.ok for proof in all_layers.values())
    assert refused > MUTANTS // 2
