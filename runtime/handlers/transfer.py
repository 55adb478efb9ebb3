"""Handlers of point-to-point transfers; a receive is posted where it stands in the list."""

from __future__ import annotations

from titan.compiler.plan.instruction import Instruction
from titan.runtime.dtypes import DTYPES
from titan.runtime.handlers.binding import Action, Binding


def send(binding: Binding, instruction: Instruction) -> Action:
    channel = binding.channel(instruction, sending=True)
    slots, registers = binding.slots, binding.registers
    source, token = registers.read(instruction.reads[0]), registers.write(instruction.writes[0])

    def run() -> None:
        slots[token] = channel.send(slots[source].contiguous())

    return run


def recv(binding: Binding, instruction: Instruction) -> Action:
    channel = binding.channel(instruction, sending=False)
    (kind,) = binding.registers.types(instruction.writes[0])
    shape, dtype = kind.shape, DTYPES[kind.dtype]
    slots, target = binding.slots, binding.registers.write(instruction.writes[0])

    def run() -> None:
        slots[target] = channel.recv(shape, dtype)

    return run
