"""Bytes that the fullest rank of a published layout holds: its plan's ledger, with what the software kept otherwise."""

from __future__ import annotations

from dataclasses import replace

from titan.compiler.cost.machine import Machine
from titan.compiler.cost.memory import communicator_count
from titan.compiler.plan.program import Block, Plan, Role
from titan.compiler.plan.sizes import Sizes, block_profile

from tests.benchmarks.published_runs.software import LOSS_BYTES, Software


def held_bytes(plan: Plan, machine: Machine, software: Software) -> tuple[int, int, int]:
    """(tensors, point, upper bound) of the rank that holds most."""
    sizes, worst = Sizes(plan), (0, 0, 0)
    for role in plan.roles:
        buffers = sum(
            b.bytes // (2 if b.kind == "gradients" and software.narrow_gradients else 1) for b in role.buffers
        )
        tensors = buffers + live_activations(plan, role, sizes, software) + _loss(plan, role, software)
        communicators = round(communicator_count(plan, role) * machine.figures["communicator_bytes"])
        point = round(tensors * (1 + machine.figures["allocator_slack"])) + communicators + machine.reserved
        upper = round(tensors * (1 + machine.figures["allocator_slack_upper"]) + 1.5 * communicators) + machine.reserved
        worst = max(worst, (tensors, point, upper))
    return worst


def _loss(plan: Plan, role: Role, software: Software) -> int:
    """Logits in 32 bits and what is made of them, where the software's loss is not fused."""
    heads = [s for s in plan.segments if any(c.operator == "vocab_sum" for c in s.body)]
    if not software.wide_loss or not heads or role.pipeline != plan.roles[-1].pipeline:
        return 0
    call = next(c for c in heads[0].body if c.operator == "vocab_sum")
    return LOSS_BYTES * heads[0].types[call.operands[0]].elements


def live_activations(plan: Plan, role: Role, sizes: Sizes, software: Software) -> int:
    """Peak of live registers and workspace, where the software keeps less of a layer and makes it again."""
    profiles = {}
    for block in role.blocks:
        found = block_profile(block, sizes)
        dropped = _dropped(plan, role, block.name, sizes, software)
        layers, total = len(dropped), sum(dropped)
        one = max(dropped, default=0)
        if block.name.startswith("F."):
            found = replace(found, change=found.change - total, height=found.height - total + (one if layers else 0))
        elif block.name[0] in "BI":
            found = replace(found, change=found.change + total, height=found.height + one)
        profiles[block.name] = found
    live = peak = 0
    for call in role.order("train"):
        profile = profiles[call.block]
        peak = max(peak, live + profile.height + profile.workspace)
        live += profile.change
    return peak


def _dropped(plan: Plan, role: Role, block: str, sizes: Sizes, software: Software) -> list[int]:
    """Bytes that are not kept of each layer of a block's chunk: a share of all but the layer's input where it is run
    again, what is gathered again, and half of what is kept in 8 bits. Less than nothing where more is kept."""
    phase, _, rest = block.partition(".")
    forward = role.block_table.get(f"F.{rest.partition('.')[0]}")
    if phase not in "FBI" or forward is None:
        return []
    freed = {n for i in forward.instructions if i.opcode == "free" for n in i.reads}
    gathered = _gathered(forward) if software.shard_kept else set[str]()
    others = 1 - 1 / plan.mesh.size("tensor")
    held: dict[int, float] = {}
    for i in forward.instructions:
        for name in i.writes:
            base = name.rstrip("?").partition(":")[0]
            head, mark, layer = base.rpartition(".l")
            if name not in freed and not name.endswith("?") and mark and layer.isdigit() and head != "x":
                share = others if base in gathered else 0.0
                share = 1 - (1 - share) * software.kept
                share = 1 - (1 - share) * (1 - software.again.dropped)
                held[int(layer)] = held.get(int(layer), 0.0) + share * sizes.register(name)
    inside = {layer for chunk in role.layers for layer in chunk}
    return [round(size) for layer, size in held.items() if layer in inside]


def _gathered(forward: Block) -> set[str]:
    """Activations that a block gathers over tensor ranks."""
    return {
        name.rstrip("?").partition(":")[0]
        for i in forward.instructions
        if i.opcode == "all_gather" and i.group.startswith("tensor")
        for name in i.writes
    }
