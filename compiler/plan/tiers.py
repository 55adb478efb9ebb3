"""Plans that leave recompute tiers to the run: each choice of tiers is a plan without choices.

A frame is what a layer stores of a micro-batch. Its `watermark` writes the tier into a register (`tier.l5:i`), and
instructions that not all tiers share say in which they run. So the plan of any choice is a filter away, and whoever
reads plans (proofs, prices, memory) reads that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.program import Block, Plan, Role


def layer_of(frame: str) -> int:
    """`tier.l5:i` -> 5."""
    return int(frame.partition(":")[0].removeprefix("tier.l"))


def at_tiers(plan: Plan, tier: Callable[[int], str]) -> Plan:
    """The plan in which each layer has one tier, for all micro-batches."""
    if not plan.adaptive:
        return plan
    return replace(plan, roles=tuple(_role(role, tier) for role in plan.roles))


def _role(role: Role, tier: Callable[[int], str]) -> Role:
    blocks = tuple(Block(b.name, b.parameters, _chosen(b.instructions, tier)) for b in role.blocks)
    return replace(role, blocks=blocks)


def _chosen(instructions: Iterable[Instruction], tier: Callable[[int], str]) -> tuple[Instruction, ...]:
    return tuple(i.always() for i in instructions if not i.when or tier(layer_of(i.frame)) in i.when)


def start_tiers(plan: Plan) -> dict[int, str]:
    """The tier that each layer begins with."""
    return {
        layer_of(i.writes[0]): str(i.attribute("begin"))
        for role in plan.roles
        for block in role.blocks
        for i in block.instructions
        if i.opcode == "watermark"
    }


def at_start(plan: Plan) -> Plan:
    """The plan with the tiers that it begins with: what is predicted of it."""
    if not plan.adaptive:
        return plan
    start = start_tiers(plan)
    return at_tiers(plan, lambda layer: start[layer])
