"""Handlers of compute instructions: segments forward and backward, the loss, sums of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.segment import Segment, bind, parse_unit
from titan.runtime.dtypes import DTYPES
from titan.runtime.handlers.binding import Action, Binding
from titan.runtime.registers import ProgramError, reader, writer
from titan.runtime.segments import NOTHING
from titan.runtime.transposes import Given
from torch import Tensor


def forward(binding: Binding, instruction: Instruction) -> Action:
    """Outputs, and the pieces of the frame that are written."""
    template, bound = _template(binding, instruction), binding.segment(instruction.unit)
    slots, registers, place = binding.slots, binding.registers, binding.place(instruction)
    read = reader(slots, [registers.read(n) for n in instruction.reads[: len(template.inputs)]])
    held = _held(binding, instruction.unit, instruction.reads[len(template.inputs) :])
    count, places = len(template.outputs), binding.places
    pieces = tuple(_piece(name) for name in instruction.writes[count:])
    write, run = _split_writer(binding, instruction, count), bound.forward_run(pieces)

    def forward() -> None:
        write(bound.run(run, read(), (), places[place], held()))

    return forward


def recompute(binding: Binding, instruction: Instruction) -> Action:
    """The missing pieces of a frame, and outputs that are not stored, from those that are."""
    template, bound = _template(binding, instruction), binding.segment(instruction.unit)
    tier, slots = str(instruction.attribute("tier")), binding.slots
    places, place = binding.places, binding.place(instruction)
    again, stored = template.rebuild(tier), template.stored(tier)
    if again is None:
        raise ProgramError(f"tier {tier} rebuilds nothing of {template.name}")
    count = len(again.reads)
    given = [binding.registers.read(n) for n in instruction.reads[: count + len(stored)]]
    read, frame = reader(slots, given[:count]), reader(slots, given[count:])
    held = _held(binding, instruction.unit, instruction.reads[count + len(stored) :])
    write, run = _split_writer(binding, instruction, len(again.writes)), bound.rebuild_run(tier)

    def recompute() -> None:
        write(bound.run(run, read(), frame(), places[place], held()))

    return recompute


def _piece(register: str) -> str:
    """The prefix of a frame's piece: `r.fn.s0.l5:3` -> `fn`."""
    return register.removeprefix("r.").partition(".")[0]


def _split_writer(binding: Binding, instruction: Instruction, count: int) -> Callable[[Sequence[Tensor]], None]:
    """Writes values: the first `count` into a register each, the others as the pieces of the frame that follow."""
    slots, template = binding.slots, _template(binding, instruction)
    write = writer(slots, [binding.registers.write(n) for n in instruction.writes[:count]])
    pieces: list[tuple[int, int, int]] = []
    start = count
    for name in instruction.writes[count:]:
        values = template.pieces.get(_piece(name))
        if values is None:
            raise ProgramError(f"{template.name} has no piece {name}")
        pieces.append((binding.registers.write(name), start, start + len(values)))
        start += len(values)

    def put(made: Sequence[Tensor]) -> None:
        write(made[:count])
        for slot, first, stop in pieces:
            slots[slot] = tuple(made[first:stop])

    return put


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
        self.frame = reader(slots, take(len(template.pieces)))
        self.held = _held(binding, instruction.unit, names)
        self.into = _held(binding, instruction.unit, instruction.updates)


def backward(binding: Binding, instruction: Instruction) -> Action:
    bound, reads = binding.segment(instruction.unit), _BackwardReads(binding, instruction)
    write = writer(binding.slots, [binding.registers.write(n) for n in instruction.writes])
    places, place, frame = binding.places, binding.place(instruction), reads.frame
    names = reads.carried_names

    def run() -> None:
        kept = tuple(chain.from_iterable(frame()))
        carried = dict(zip(names, reads.carried()))
        values = (reads.gradients(), carried, reads.inputs(), reads.outputs(), kept)
        write(bound.backward(*values, places[place], reads.held(), reads.into()))

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
        kept = tuple(chain.from_iterable(frame()))
        carried = dict(zip(names, reads.carried()))
        values = (reads.gradients(), carried, reads.inputs(), reads.outputs(), kept)
        gradients, left = bound.backward_input(*values, places[place], reads.held(), reads.into())
        write(gradients)
        if weight_frame is not None:
            slots[weight_frame] = left

    return run


def backward_weight(binding: Binding, instruction: Instruction) -> Action:
    bound, place = binding.segment(instruction.unit), binding.place(instruction)
    (frame,) = [binding.registers.read(n) for n in instruction.reads]
    into = _held(binding, instruction.unit, instruction.updates)
    slots, places = binding.slots, binding.places

    def run() -> None:
        bound.backward_weight(slots[frame], places[place], into())

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


def _held(binding: Binding, unit: str, names: Sequence[str]) -> Callable[[], Given]:
    """What whole buckets in registers hold of the segment's parameters. Buffers are reached through their views: that
    they are here is all there is to check."""
    segment, layer = parse_unit(unit)
    formals = {bind(f, layer): f for f in binding.plan.segment_table[segment].parameters}
    found: list[tuple[int, str, int, int, tuple[int, ...]]] = []
    for name in names:
        if binding.registers.is_buffer(name):
            continue
        slot, bucket = binding.registers.read(name), binding.plan.bucket_of(name)
        for p in binding.plan.bucket_parameters(bucket.name):
            if p.name in formals:
                found.append((slot, formals[p.name], p.offset, p.offset + p.tensor.elements, p.tensor.shape))
    if not found:
        return lambda: NOTHING
    slots = binding.slots
    return lambda: {formal: slots[slot][start:stop].view(shape) for slot, formal, start, stop, shape in found}
