"""Handlers of copies to host memory and back."""

from __future__ import annotations

from titan.compiler.plan.instruction import Instruction
from titan.runtime.handlers.binding import Action, Binding


def offload(binding: Binding, instruction: Instruction) -> Action:
    """A register into host memory, or optimizer state from its register back into its buffer there."""
    slots, registers, link = binding.slots, binding.registers, binding.host
    source = registers.read(instruction.reads[0])
    buffers = [slots[registers.buffer(name)] for name in instruction.updates]
    target = registers.write(instruction.writes[0])

    def run() -> None:
        slots[target] = link.store(slots[source], *buffers) if buffers else link.offload(slots[source])

    return run


def prefetch(binding: Binding, instruction: Instruction) -> Action:
    """From host memory into a register: a register's copy, or a buffer."""
    slots, link = binding.slots, binding.host
    source, target = binding.registers.read(instruction.reads[0]), binding.registers.write(instruction.writes[0])

    def run() -> None:
        slots[target] = link.prefetch(slots[source])

    return run
