"""Overlapped pairs: a forward and a backward so merged that each computes while the other communicates.

Both lists keep their order. Where one would wait for its own communication, the other goes on, until it would wait too.
"""

from __future__ import annotations

from dataclasses import replace

from titan.compiler.passes.overlap import OWN
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.program import Block


def interleave(forward: Block, backward: Block) -> Block:
    """The block of a pair: `forward` for micro-batch i, `backward` for micro-batch j."""
    lists = (list(forward.instructions), [_renamed(instruction) for instruction in backward.instructions])
    position, turn, merged = [0, 0], 1, []
    while position[0] < len(lists[0]) or position[1] < len(lists[1]):
        if position[turn] >= len(lists[turn]):
            turn = 1 - turn
        stop = _run_until_wait(lists[turn], position[turn])
        merged += lists[turn][position[turn] : stop]
        position[turn] = stop
        turn = 1 - turn
    following = (*forward.parameters[1:], *backward.parameters[1:])  # for which something is issued here
    return Block(f"{forward.name}+{backward.name}", (*OWN, *following), tuple(merged))


def _run_until_wait(instructions: list[Instruction], start: int) -> int:
    """One past the last instruction before the next wait for communication that this list issued itself."""
    position = start
    while position < len(instructions):
        if instructions[position].row.asynchronous and instructions[position].opcode != "send":
            position += 1
            if position < len(instructions) and instructions[position].opcode == "wait":
                return position
            continue
        position += 1
    return position


def _renamed(instruction: Instruction) -> Instruction:
    def j(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name.replace(":i", ":j") for name in names)

    attributes = tuple(
        (k, "j" if k == "micro_batch" else str(v).replace(":i", ":j") if k == "frame" else v)
        for k, v in instruction.attributes
    )
    writes, reads, updates = map(j, (instruction.writes, instruction.reads, instruction.updates))
    return replace(instruction, writes=writes, reads=reads, updates=updates, attributes=attributes)
