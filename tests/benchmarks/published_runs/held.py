"""Bytes that the fullest rank of a published layout holds: its plan's ledger, with what the software kept otherwise."""

from __future__ import annotations

from dataclasses import replace

from titan.compiler.cost.machine import Machine
from titan.compiler.cost.memory import communicator_count
from titan.compiler.plan.program import Block, Plan, Role
from titan.compiler.plan.segment import Segment
from titan.compiler.plan.sizes import Sizes, block_profile

from tests.benchmarks.published_runs.software import (
    KEPT_BESIDES,
    LOSS_BYTES,
    PLAN_LOSS,
    SCORE_BYTES,
    SCORES_KEPT,
    Software,
)


def held_bytes(plan: Plan, machine: Machine, software: Software) -> tuple[int, int, int, int]:
    """(tensors, point, upper bound, outside the allocator) of the rank that holds most."""
    sizes, worst = Sizes(plan), (0, 0, 0, 0)
    for role in plan.roles:
        tensors = _buffers(role, software) + live_activations(plan, role, sizes, software)
        tensors += _loss(plan, role, sizes, software)
        communicators = round(communicator_count(plan, role) * machine.figures["communicator_bytes"])
        outside = communicators + machine.reserved
        point = round(tensors * (1 + machine.figures["allocator_slack"])) + outside
        upper = round(tensors * (1 + machine.figures["fragments"]) + 1.5 * communicators) + machine.reserved
        worst = max(worst, (tensors, point, upper, outside))
    return worst


def _buffers(role: Role, software: Software) -> int:
    """Parameters, gradients and optimizer state as wide as the software keeps them, and what it moves them through."""
    held = dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
    for buffer in role.buffers:
        held[buffer.kind] = held.get(buffer.kind, 0) + buffer.bytes
    if software.narrow_gradients:
        held["gradients"] //= 2
    elif software.second_gradients:
        held["gradients"] += held["parameters"]
    if software.widened_shard:
        held["widened"] = held["optimizer"] // 3  # of a number's three in 32 bits
    if software.narrow_state:
        held["optimizer"] //= 3  # two moments in 16 bits instead of three numbers in 32
    return sum(held.values()) + software.step_buffers


def _loss(plan: Plan, role: Role, sizes: Sizes, software: Software) -> int:
    """What a loss of separate kernels holds beside the plan's logits and their gradient. It is gone when the gradient
    of the head's own weights is formed."""
    heads = [s for s in plan.segments if any(c.operator == "vocab_sum" for c in s.body)]
    if software.loss == "fused" or not heads or role.pipeline != plan.roles[-1].pipeline:
        return 0
    call = next(c for c in heads[0].body if c.operator == "vocab_sum")
    logits = heads[0].types[call.operands[0]].elements
    whole = logits * (plan.mesh.size("tensor") if software.gathered_loss else 1)
    later = [
        sizes.whole_bucket(name)
        for block in role.blocks
        for i in block.instructions
        for name in i.writes
        if i.opcode == "open_grad" and name.removeprefix("r.").partition(":")[0].endswith(".head")
    ]
    return max(LOSS_BYTES[software.loss] * whole - PLAN_LOSS * logits - max(later, default=0), 0)


def live_activations(plan: Plan, role: Role, sizes: Sizes, software: Software) -> int:
    """Peak of live registers and workspace, where the software keeps less of a layer and makes it again."""
    profiles = {}
    besides, scores = _kept_besides(plan, software), _scores(plan, software)
    for block in role.blocks:
        found = block_profile(block, sizes)
        dropped = _dropped(plan, role, block.name, sizes, software)
        layers, made = len(dropped), max(dropped, default=0)
        total = sum(dropped) - round(layers * besides * (1 - software.again.dropped))
        one = made + round(besides * software.again.dropped) + scores if layers else 0
        if block.name.startswith("F."):
            found = replace(found, change=found.change - total, height=found.height - total + made)
        elif block.name[0] in "BI":
            found = replace(found, change=found.change + total, height=found.height + one)
        profiles[block.name] = found
    live = peak = 0
    for call in role.order("train"):
        profile = profiles[call.block]
        peak = max(peak, live + profile.height + profile.workspace)
        live += profile.change
    return peak


def _kept_besides(plan: Plan, software: Software) -> float:
    """Bytes that a layer's separate kernels keep until backward and one kernel would not."""
    if not software.keeps_besides:
        return 0.0
    return sum(
        KEPT_BESIDES.get(call.operator, 0.0) * segment.types[call.results[0]].elements
        for segment in plan.segments
        if _repeated(segment)
        for call in segment.body
        if call.operator in software.separate
    )


def _scores(plan: Plan, software: Software) -> int:
    """Bytes of a layer's attention scores that are there only while it runs backward."""
    kept = 0 if software.again.attention else SCORES_KEPT
    found = 0
    for segment in plan.segments:
        for call in segment.body:
            if call.operator == "attention_scores":
                batch, queries, width = segment.types[call.operands[0]].shape
                heads = width // int(dict(call.attributes)["head_dim"])
                found = batch * heads * queries * segment.types[call.operands[1]].shape[1]
    return (SCORE_BYTES[software.softmax] - kept) * found


def _repeated(segment: Segment) -> bool:
    """Whether it is part of a layer: its parameters are those of any."""
    return any(name.startswith(".") for name in segment.parameters)


def _dropped(plan: Plan, role: Role, block: str, sizes: Sizes, software: Software) -> list[int]:
    """Bytes that are not kept of each layer of a block's chunk: a share of all but the layer's input where it is run
    again, what is gathered again, and half of what is kept in 8 bits. Less than nothing where more is kept."""
    phase, _, rest = block.partition(".")
    own = ["F", rest.partition(".")[0]]  # of which there may be variants only
    forward = next((b for b in role.blocks if b.name.split(".")[:2] == own), None)
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
                if software.weighted_experts and head.startswith("down"):
                    share = 1.0
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
