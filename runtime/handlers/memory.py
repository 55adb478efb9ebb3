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


def watermark(binding: Binding, instruction: Instruction) -> Action:
    """Without anybody to decide, every frame has the tier that the plan begins with."""
    (frame,), slots = instruction.writes, binding.slots
    target, position = binding.registers.write(frame), binding.registers.position
    begin = str(instruction.attribute("begin"))

    def run() -> None:
        slots[target] = begin if binding.admit is None else binding.admit(frame, position)

    return run


def free(binding: Binding, instruction: Instruction) -> Action:
    slots = binding.slots
    ended = tuple(binding.registers.free(name) for name in instruction.reads)

    def run() -> None:
        for slot in ended:
            slots[slot] = None

    return run
