"""Handlers on parameter, gradient and optimizer buffers."""

from __future__ import annotations

import torch
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.program import Bucket
from titan.runtime.dtypes import DTYPES
from titan.runtime.handlers.binding import Action, Binding
from titan.runtime.optimizer import BucketOptimizer, counted_range, sum_of_squares
from titan.runtime.registers import ProgramError


def unshard(binding: Binding, instruction: Instruction) -> Action:
    communicator = binding.communicator(instruction)
    slots, buffer = binding.slots, binding.registers.buffer(instruction.updates[0])
    token = binding.registers.write(instruction.writes[0])

    def run() -> None:
        slots[token] = communicator.all_gather_in_place(slots[buffer])

    return run


def reduce_grad(binding: Binding, instruction: Instruction) -> Action:
    communicator, mode = binding.communicator(instruction), instruction.attribute("mode")
    slots, index = binding.slots, binding.registers.buffer(instruction.updates[0])
    buffer, token = slots[index], binding.registers.write(instruction.writes[0])
    if mode == "reduce_scatter":
        operation = communicator.reduce_scatter_in_place
    elif mode == "all_reduce":
        operation = communicator.all_reduce_in_place
    elif mode == "all_reduce_shard":
        operation = communicator.all_reduce_in_place
        shard = str(instruction.attribute("shard"))
        length = len(buffer) // binding.plan.group_size(shard)
        start = length * binding.plan.mesh.coordinate(binding.coordinates, shard)
        buffer = buffer[start : start + length]
    else:
        raise ProgramError(f"mode is {mode}, must be all_reduce, reduce_scatter or all_reduce_shard")

    def run() -> None:
        slots[token] = operation(buffer)

    return run


def grad_norm(binding: Binding, instruction: Instruction) -> Action:
    """The *squared* norm of what this rank counts."""
    parts = []
    for name in instruction.reads:
        binding.registers.buffer(name)
        counted = counted_range(binding.plan, _bucket(binding, name), binding.coordinates)
        if counted is not None:
            parts.append(binding.state.buffers[name][counted[0] : counted[1]])
    (kind,) = binding.registers.types(instruction.writes[0])
    slots, target, device = binding.slots, binding.registers.write(instruction.writes[0]), binding.device
    dtype = DTYPES[kind.dtype]

    def run() -> None:
        total = torch.zeros((), dtype=torch.float64, device=device)
        for part in parts:
            total += sum_of_squares(part)
        slots[target] = total.to(dtype)

    return run


def optimizer_step(binding: Binding, instruction: Instruction) -> Action:
    """Operands: the bucket's gradient and the squared norm of the whole model's."""
    gradient, squares = instruction.reads
    bucket = _bucket(binding, gradient)
    for name in (gradient, *instruction.updates):
        binding.registers.buffer(name)
    optimizer = BucketOptimizer(binding.plan, bucket, binding.state)
    slots, norm_slot = binding.slots, binding.registers.read(squares)
    capture, flat = binding.capture, binding.state.buffers[gradient]

    def run() -> None:
        if capture is not None:
            capture(bucket.name, flat)
        norm = binding.finite(slots[norm_slot])
        if norm is not None:
            optimizer.step(binding.step, norm)

    return run


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
