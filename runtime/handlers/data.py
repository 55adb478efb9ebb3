"""Handlers of data and reports."""

from __future__ import annotations

import torch
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.mask import Run
from titan.compiler.plan.sequence import runs
from titan.runtime.data import IGNORED
from titan.runtime.documents import Documents
from titan.runtime.dtypes import DTYPES
from titan.runtime.handlers.binding import Action, Binding
from titan.runtime.host import to_device
from titan.runtime.registers import ProgramError


def load_batch(binding: Binding, instruction: Instruction) -> Action:
    what = instruction.attribute("what")
    if what == "count":
        return _count(binding, instruction)
    if what == "starts":
        return _starts(binding, instruction)
    if what not in ("tokens", "labels"):
        raise ProgramError(f"what is {what}, must be tokens, labels, starts or count")
    part = 0 if what == "tokens" else 1
    found = _runs(binding, instruction)
    place = binding.place_number(int(instruction.attribute("micro_batch")))
    slots, target = binding.slots, binding.registers.write(instruction.writes[0])
    source, places, device = binding.source, binding.places, binding.device

    def run() -> None:
        parts = [source.load(places[place].samples, start, start + length)[part] for start, length in found]
        slots[target] = to_device(parts[0] if len(parts) == 1 else torch.cat(parts, 1), device)

    return run


def _starts(binding: Binding, instruction: Instruction) -> Action:
    """Where the document of each token begins."""
    found, source = _runs(binding, instruction), binding.source
    if not isinstance(source, Documents):
        raise ProgramError("the plan has no separator of documents")
    place = binding.place_number(int(instruction.attribute("micro_batch")))
    slots, target = binding.slots, binding.registers.write(instruction.writes[0])
    places, device = binding.places, binding.device

    def run() -> None:
        slots[target] = to_device(source.starts(places[place].samples, found), device)

    return run


def _count(binding: Binding, instruction: Instruction) -> Action:
    """Labels that count, over all micro-batches of this rank's rows and positions."""
    found = _runs(binding, instruction)
    (kind,) = binding.registers.types(instruction.writes[0])
    slots, target = binding.slots, binding.registers.write(instruction.writes[0])
    micro_batches = range(int(binding.plan.setting("train.micro_batches")))
    source, device, dtype = binding.source, binding.device, DTYPES[kind.dtype]

    def run() -> None:
        valid = 0
        for i in micro_batches:
            for start, length in found:
                _, labels = source.load(binding.samples(i, binding.step), start, start + length)
                valid += int((labels != IGNORED).sum())
        slots[target] = torch.full((), valid, dtype=dtype, device=device)

    return run


def _runs(binding: Binding, instruction: Instruction) -> tuple[Run, ...]:
    """This rank's positions of the sequence; its context slice when not written out."""
    whole = int(binding.plan.setting("train.sequence")) + int(binding.plan.setting("train.padding", 0))
    share = whole // binding.plan.mesh.size("context")
    length = binding.number(instruction, "length", share)
    start = binding.number(instruction, "start", f"@context*{length}")
    return runs(start, length, int(instruction.attribute("zigzag", 0)), int(instruction.attribute("chunk", 0)))


def report(binding: Binding, instruction: Instruction) -> Action:
    """A scalar for the log; it is read as a number when the step ends."""
    name, source = str(instruction.attribute("name")), binding.registers.read(instruction.reads[0])
    slots, reports = binding.slots, binding.reports

    def run() -> None:
        reports[name] = slots[source].clone()

    return run
