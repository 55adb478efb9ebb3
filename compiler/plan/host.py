"""Host memory of a rank beside its device: optimizer state that lives there, and registers on their way through it."""

from __future__ import annotations

from collections.abc import Sequence

from titan.compiler.plan.listing import stretches, weighted
from titan.compiler.plan.program import Block, BlockCall, Role
from titan.compiler.plan.sizes import Sizes


def host_memory(role: Role, sizes: Sizes) -> dict[str, int]:
    """Bytes of one rank in host memory: `optimizer` state in buffers, and `activations`: the most that any order holds
    at once, each from the offload that is issued to the `free` of its copy."""
    buffers = sum(buffer.bytes for buffer in role.buffers if buffer.place == "host")
    if "offload" not in sizes.plan.opcodes:
        return {"optimizer": buffers, "activations": 0}
    moves = sizes.each(role, _block)
    return {"optimizer": buffers, "activations": max(_highest(role.order(name), moves) for name in role.longest)}


def _highest(calls: Sequence[BlockCall], moves: dict[str, tuple[int, int]]) -> int:
    live = most = 0
    for call in calls:
        change, height = moves[call.block]
        most = max(most, live + height)
        live += change
    return most


def _block(block: Block, sizes: Sizes, role: Role) -> tuple[int, int]:
    """(net change, height above the beginning) in bytes."""
    live = most = 0
    for stretch in stretches(block.instructions):
        begin, highest = live, -1
        for instruction in stretch.instructions:
            if instruction.opcode == "free":
                live -= sum(map(sizes.host, instruction.reads))
            elif instruction.opcode == "offload":
                live += sum(map(sizes.host, instruction.writes))
                highest = max(highest, live)
        further = (live - begin) * (stretch.times - 1)
        most = max(most, highest, highest + further if highest >= 0 else 0)
        live += further
    return live, most


def host_traffic(role: Role, sizes: Sizes, order: str = "train") -> tuple[int, int]:
    """Bytes that one rank moves in a step (to the host, from it)."""
    moved = {"offload": 0, "prefetch": 0}
    table = {
        block.name: {
            opcode: sum(n * sizes.traffic(i).payload for i, n in weighted(block.instructions) if i.opcode == opcode)
            for opcode in moved
        }
        for block in role.blocks
    }
    for call in role.order(order):
        for opcode in moved:
            moved[opcode] += table[call.block][opcode]
    return moved["offload"], moved["prefetch"]
