"""Handlers of waits and frees."""

from __future__ import annotations

from titan.compiler.plan.instruction import Instruction
from titan.runtime.handlers.binding import Action, Binding
from titan.runtime.transport.base import Handle


def wait(binding: Binding, instruction: Instruction) -> Action:
    """One pending register; gives back its handle as long as that is not done."""
    slots = binding.slots
    value = instruction.writes[0] if instruction.writes else None
    pending, target = binding.registers.settle(instruction.reads[0], value)

    def run() -> Handle | None:
        handle: Handle = slots[pending]
        if not handle.done():
            return handle
        result = handle.result()
        slots[pending] = None
        if target is not None:
            slots[target] = result
        return None

    return run


def free(binding: Binding, instruction: Instruction) -> Action:
    slots = binding.slots
    ended = tuple(binding.registers.free(name) for name in instruction.reads)

    def run() -> None:
        for slot in ended:
            slots[slot] = None

    return run
