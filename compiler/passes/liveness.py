"""Liveness: ends the life of every register of a block right after its last use, unless it must outlive the block."""

from __future__ import annotations

from titan.compiler.plan.instruction import Instruction


def liveness(instructions: list[Instruction], outlive: set[str]) -> tuple[Instruction, ...]:
    """Inserts `free` instructions. Registers without a micro-batch belong to the step, not to the block.

    What an asynchronous instruction reads is borrowed until its wait, so its last use is that wait.
    """
    last: dict[str, int] = {}
    borrowed: dict[str, tuple[str, ...]] = {}
    for position, instruction in enumerate(instructions):
        for name in (*instruction.reads, *instruction.writes):
            if ":" in name and not name.endswith("?"):
                last[name] = position
        if instruction.row.asynchronous:
            borrowed[instruction.writes[0]] = instruction.reads
        elif instruction.opcode == "wait":
            for name in borrowed.pop(instruction.reads[0], ()):
                if ":" in name:
                    last[name] = position
    ends: dict[int, list[str]] = {}
    for name, position in last.items():
        if name not in outlive:
            ends.setdefault(position, []).append(name)
    result: list[Instruction] = []
    for position, instruction in enumerate(instructions):
        result.append(instruction)
        if position in ends:
            result.append(Instruction("free", reads=tuple(ends[position])))
    return tuple(result)


def outside_reads(instructions: list[Instruction]) -> set[str]:
    """Registers that a block reads but does not write: what earlier blocks must leave alive for it."""
    written: set[str] = set()
    found: set[str] = set()
    for instruction in instructions:
        found.update(n for n in instruction.reads if n not in written)
        written.update(instruction.writes)
    return found
