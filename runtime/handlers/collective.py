"""Handlers of collectives: issue at once, leave the handle in the pending register."""

from __future__ import annotations

from collections.abc import Callable

import torch
from titan.compiler.plan.instruction import Instruction
from titan.runtime.dtypes import DTYPES
from titan.runtime.handlers.binding import Action, Binding
from titan.runtime.registers import ProgramError
from titan.runtime.transport.base import Handle
from torch import Tensor


def all_gather(binding: Binding, instruction: Instruction) -> Action:
    communicator, dim = binding.communicator(instruction), int(instruction.attribute("dim", 0))
    return _issue(binding, instruction, lambda value: communicator.all_gather(value, dim))


def reduce_scatter(binding: Binding, instruction: Instruction) -> Action:
    communicator, dim = binding.communicator(instruction), int(instruction.attribute("dim", 0))
    return _issue(binding, instruction, lambda value: communicator.reduce_scatter(value, dim))


def all_reduce(binding: Binding, instruction: Instruction) -> Action:
    communicator, op = binding.communicator(instruction), str(instruction.attribute("op", "sum"))
    if op not in ("sum", "max"):
        raise ProgramError(f"op is {op}, must be sum or max")
    return _issue(binding, instruction, lambda value: communicator.all_reduce(value, op))


def all_to_all(binding: Binding, instruction: Instruction) -> Action:
    communicator = binding.communicator(instruction)
    split, concat = int(instruction.attribute("split")), int(instruction.attribute("concat"))
    return _issue(binding, instruction, lambda value: communicator.all_to_all(value, split, concat))


def broadcast(binding: Binding, instruction: Instruction) -> Action:
    """The members that are not the root read nothing."""
    communicator, root = binding.communicator(instruction), int(instruction.attribute("root", 0))
    if (communicator.position == root) != bool(instruction.reads):
        raise ProgramError(f"position {communicator.position} of the group, root {root}: only the root reads")
    if instruction.reads:
        return _issue(binding, instruction, lambda value: communicator.broadcast(value, root))
    (kind,) = binding.registers.types(instruction.writes[0])
    shape, dtype, device = kind.shape, DTYPES[kind.dtype], binding.device
    slots, target = binding.slots, binding.registers.write(instruction.writes[0])

    def run() -> None:
        slots[target] = communicator.broadcast(torch.empty(shape, dtype=dtype, device=device), root)

    return run


def _issue(binding: Binding, instruction: Instruction, operation: Callable[[Tensor], Handle]) -> Action:
    slots, registers = binding.slots, binding.registers
    (name,) = instruction.reads
    source, target = registers.read(name), registers.write(instruction.writes[0])
    if registers.is_buffer(name):
        (kind,) = registers.types(instruction.writes[0])
        shape = kind.shape  # a buffer is flat; a scalar one is read as a scalar

        def from_buffer() -> None:
            slots[target] = operation(slots[source].view(shape))

        return from_buffer

    def run() -> None:
        slots[target] = operation(slots[source])

    return run
