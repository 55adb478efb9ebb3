"""Handlers of compute instructions: segments forward and backward, the loss, sums of gradients."""

from __future__ import annotations

import torch
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.segment import Segment, parse_unit
from titan.runtime.dtypes import DTYPES
from titan.runtime.handlers.binding import Action, Binding
from titan.runtime.registers import ProgramError, reader, writer


def forward(binding: Binding, instruction: Instruction) -> Action:
    """Also `recompute`: outputs, and the frame when one is written."""
    template, bound = _template(binding, instruction), binding.segment(instruction.unit)
    slots, registers, place = binding.slots, binding.registers, binding.place(instruction)
    read = reader(slots, [registers.read(n) for n in instruction.reads[: len(template.inputs)]])
    _read_buffers(binding, instruction.reads[len(template.inputs) :])
    count = len(template.outputs)
    write = writer(slots, [registers.write(n) for n in instruction.writes[:count]])
    kept = [registers.write(n) for n in instruction.writes[count:]]
    places = binding.places
    if not kept:

        def plain() -> None:
            outputs, _ = bound.forward(read(), places[place], False)
            write(outputs)

        return plain
    (frame,) = kept

    def keeping() -> None:
        outputs, slots[frame] = bound.forward(read(), places[place], True)
        write(outputs)

    return keeping


class _BackwardReads:
    """The operands of a backward, taken apart by position."""

    def __init__(self, binding: Binding, instruction: Instruction) -> None:
        template = _template(binding, instruction)
        carried = tuple(w for w in str(instruction.attribute("carry")).split(",") if w)
        names = list(instruction.reads)

        def take(count: int) -> list[int]:
            taken = [binding.registers.read(n) for n in names[:count]]
            del names[:count]
            if len(taken) != count:
                raise ProgramError(f"{instruction.opcode} has {len(instruction.reads)} operands, more are needed")
            return taken

        slots = binding.slots
        self.gradients = reader(slots, take(sum(o in template.differentiable for o in template.outputs)))
        self.carried_names = carried
        self.carried = reader(slots, take(len(carried)))
        self.inputs = reader(slots, take(len(template.kept_inputs)))
        self.outputs = reader(slots, take(len(template.kept_outputs)))
        self.frame = take(1)[0] if template.frame else None
        _read_buffers(binding, names)
        for name in instruction.updates:
            binding.registers.buffer(name)


def backward(binding: Binding, instruction: Instruction) -> Action:
    bound, reads = binding.segment(instruction.unit), _BackwardReads(binding, instruction)
    write = writer(binding.slots, [binding.registers.write(n) for n in instruction.writes])
    slots, places, place, frame = binding.slots, binding.places, binding.place(instruction), reads.frame
    names = reads.carried_names

    def run() -> None:
        kept = () if frame is None else slots[frame]
        carried = dict(zip(names, reads.carried()))
        write(bound.backward(reads.gradients(), carried, reads.inputs(), reads.outputs(), kept, places[place]))

    return run


def backward_input(binding: Binding, instruction: Instruction) -> Action:
    template, bound = _template(binding, instruction), binding.segment(instruction.unit)
    reads = _BackwardReads(binding, instruction)
    written = [binding.registers.write(n) for n in instruction.writes]
    weight_frame = written.pop() if template.weight_frame else None
    write = writer(binding.slots, written)
    slots, places, place, frame = binding.slots, binding.places, binding.place(instruction), reads.frame
    names = reads.carried_names

    def run() -> None:
        kept = () if frame is None else slots[frame]
        carried = dict(zip(names, reads.carried()))
        gradients, left = bound.backward_input(
            reads.gradients(), carried, reads.inputs(), reads.outputs(), kept, places[place]
        )
        write(gradients)
        if weight_frame is not None:
            slots[weight_frame] = left

    return run


def backward_weight(binding: Binding, instruction: Instruction) -> Action:
    bound, place = binding.segment(instruction.unit), binding.place(instruction)
    (frame,) = [binding.registers.read(n) for n in instruction.reads]
    for name in instruction.updates:
        binding.registers.buffer(name)
    slots, places = binding.slots, binding.places

    def run() -> None:
        bound.backward_weight(slots[frame], places[place])

    return run


def loss(binding: Binding, instruction: Instruction) -> Action:
    """Also writes the gradient of the loss by itself, which is one, where a backward will want it."""
    slots, registers = binding.slots, binding.registers
    source, target = registers.read(instruction.reads[0]), registers.buffer(instruction.updates[0])
    seeds = [registers.write(name) for name in instruction.writes]
    kinds = [registers.types(name)[0] for name in instruction.writes]
    ones = [torch.ones(kind.shape, dtype=DTYPES[kind.dtype], device=binding.device) for kind in kinds]

    def run() -> None:
        slots[target].add_(slots[source])
        for slot, one in zip(seeds, ones):
            slots[slot] = one

    return run


def add(binding: Binding, instruction: Instruction) -> Action:
    slots, registers = binding.slots, binding.registers
    left, right = (registers.read(n) for n in instruction.reads)
    target = registers.write(instruction.writes[0])

    def run() -> None:
        slots[target] = slots[left] + slots[right]

    return run


def _template(binding: Binding, instruction: Instruction) -> Segment:
    return binding.plan.segment_table[parse_unit(instruction.unit)[0]]


def _read_buffers(binding: Binding, names: list[str] | tuple[str, ...]) -> None:
    """Parameters are reached through their views; that their buckets are here is all there is to check."""
    for name in names:
        binding.registers.buffer(name)
