"""Handlers on parameter, gradient and optimizer buffers."""

from __future__ import annotations

import torch
from titan.compiler.plan.instruction import STATE, Instruction
from titan.compiler.plan.program import Bucket
from titan.runtime.dtypes import DTYPES
from titan.runtime.handlers.binding import Action, Binding
from titan.runtime.optimizer import BucketOptimizer, counted_range, sum_of_squares
from titan.runtime.registers import ProgramError
from titan.runtime.state import held_slice
from titan.runtime.transport.base import Then
from torch import Tensor


def unshard(binding: Binding, instruction: Instruction) -> Action:
    """In place, or from the shard in a buffer into a register."""
    communicator, slots = binding.communicator(instruction), binding.slots
    source = binding.registers.buffer((*instruction.reads, *instruction.updates)[0])
    target = binding.registers.write(instruction.writes[0])
    if instruction.updates:

        def in_place() -> None:
            slots[target] = communicator.all_gather_in_place(slots[source])

        return in_place

    def run() -> None:
        slots[target] = communicator.all_gather(slots[source], 0)

    return run


def open_grad(binding: Binding, instruction: Instruction) -> Action:
    """A whole gradient of zeros."""
    name = instruction.writes[0]
    (kind,) = binding.registers.types(name)
    slots, target = binding.slots, binding.registers.write(name)
    elements, dtype, device = kind.shape[0], DTYPES[kind.dtype], binding.device

    def run() -> None:
        slots[target] = torch.zeros(elements, dtype=dtype, device=device)

    return run


def reduce_grad(binding: Binding, instruction: Instruction) -> Action:
    """In place; or, when a whole gradient is read, the sum's own shard is added to the buffer at the wait."""
    communicator, mode = binding.communicator(instruction), instruction.attribute("mode")
    slots, buffer = binding.slots, binding.slots[binding.registers.buffer(instruction.updates[0])]
    read = [binding.registers.read(name) for name in instruction.reads]
    token = binding.registers.write(instruction.writes[0])
    if read and mode != "reduce_scatter":
        raise ProgramError(f"mode is {mode}, a whole gradient can only be scattered")
    if read:
        (whole,) = read

        def scatter() -> None:
            slots[token] = Then(communicator.reduce_scatter(slots[whole], 0), lambda total: _add(buffer, total))

        return scatter
    if mode == "reduce_scatter":
        operation = communicator.reduce_scatter_in_place
    elif mode == "all_reduce":
        operation = communicator.all_reduce_in_place
    elif mode == "all_reduce_shard":
        operation = communicator.all_reduce_in_place
        shard = str(instruction.attribute("shard"))
        length = len(buffer) // binding.plan.group_size(shard)
        start = length * binding.plan.position(binding.coordinates, shard)
        buffer = buffer[start : start + length]
    else:
        raise ProgramError(f"mode is {mode}, must be all_reduce, reduce_scatter or all_reduce_shard")

    def run() -> None:
        slots[token] = operation(buffer)

    return run


def _add(buffer: Tensor, total: Tensor) -> None:
    buffer.add_(total)


def grad_norm(binding: Binding, instruction: Instruction) -> Action:
    """The *squared* norm of what this rank counts."""
    parts = []
    for name in instruction.reads:
        binding.registers.buffer(name)
        bucket = _bucket(binding, name)
        counted = counted_range(binding.plan, bucket, binding.coordinates)
        if counted is not None:
            parts.append(held_slice(binding.plan, bucket, binding.state, "g", *counted))
    (kind,) = binding.registers.types(instruction.writes[0])
    slots, target, device = binding.slots, binding.registers.write(instruction.writes[0]), binding.device
    dtype = DTYPES[kind.dtype]

    def run() -> None:
        total = torch.zeros((), dtype=torch.float64, device=device)
        for piece in parts:
            total += sum_of_squares(piece)
        slots[target] = total.to(dtype)

    return run


def optimizer_step(binding: Binding, instruction: Instruction) -> Action:
    """Operands: the bucket's gradient and the squared norm of the whole model's; updated are the parameters and the
    optimizer state, in its buffer or in a register. Ahead of the norm the step keeps what it changes; `undo` brings
    that back."""
    if instruction.attribute("moment"):
        return _unchecked_step(binding, instruction)
    gradient, squares = instruction.reads
    bucket = _bucket(binding, gradient)
    parameters, state = instruction.updates
    on_host = state.startswith(STATE)
    for name in (gradient, parameters, *(() if on_host else (state,))):
        binding.registers.buffer(name)
    held = binding.registers.read(state) if on_host else None
    optimizer = BucketOptimizer(binding.plan, bucket, binding.state)
    slots, norm_slot = binding.slots, binding.registers.read(squares)
    capture, flat = binding.capture, binding.state.buffers[gradient]

    def run() -> None:
        if capture is not None:
            capture(bucket.name, flat)
        norm = binding.finite(slots[norm_slot])
        if norm is not None:
            optimizer.step(binding.step, norm, None if held is None else slots[held])

    return run


def _unchecked_step(binding: Binding, instruction: Instruction) -> Action:
    for name in (*instruction.reads, *instruction.updates):
        binding.registers.buffer(name)
    bucket, moment = _bucket(binding, instruction.reads[0]), instruction.attribute("moment")
    optimizer = BucketOptimizer(binding.plan, bucket, binding.state)
    keep = binding.state.buffers[f"k.{bucket.name}"]
    capture, flat = binding.capture, binding.state.buffers[f"g.{bucket.name}"]

    def ahead() -> None:
        if capture is not None:
            capture(bucket.name, flat)
        optimizer.keep(keep)
        optimizer.step(binding.step, 0.0)

    def undo() -> None:
        optimizer.restore(keep)

    if moment not in ("ahead", "undo"):
        raise ProgramError(f"moment is {moment}, must be ahead or undo")
    return ahead if moment == "ahead" else undo


def zero_grad(binding: Binding, instruction: Instruction) -> Action:
    buffers = [binding.slots[binding.registers.buffer(name)] for name in instruction.updates]

    def run() -> None:
        for buffer in buffers:
            buffer.zero_()

    return run


def _bucket(binding: Binding, buffer: str) -> Bucket:
    """The bucket of `g.l0`."""
    found = binding.plan.bucket_table.get(buffer.partition(".")[2])
    if found is None:
        raise ProgramError(f"{buffer} belongs to no bucket")
    return found
