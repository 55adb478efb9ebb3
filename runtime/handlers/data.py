"""Handlers of data and reports."""

from __future__ import annotations

import torch
from titan.compiler.plan.instruction import Instruction
from titan.runtime.data import IGNORED
from titan.runtime.dtypes import DTYPES
from titan.runtime.handlers.binding import Action, Binding
from titan.runtime.registers import ProgramError


def load_batch(binding: Binding, instruction: Instruction) -> Action:
    what = instruction.attribute("what")
    if what == "count":
        return _count(binding, instruction)
    if what not in ("tokens", "labels"):
        raise ProgramError(f"what is {what}, must be tokens, labels or count")
    part = 0 if what == "tokens" else 1
    start, length = _range(binding, instruction)
    place = binding.place_number(int(instruction.attribute("micro_batch")))
    slots, target = binding.slots, binding.registers.write(instruction.writes[0])
    source, places, device = binding.source, binding.places, binding.device

    def run() -> None:
        slots[target] = source.load(places[place].samples, start, start + length)[part].to(device)

    return run


def _count(binding: Binding, instruction: Instruction) -> Action:
    """Labels that count, over all micro-batches of this rank's rows and positions."""
    start, length = _range(binding, instruction)
    (kind,) = binding.registers.types(instruction.writes[0])
    slots, target = binding.slots, binding.registers.write(instruction.writes[0])
    micro_batches = range(int(binding.plan.setting("train.micro_batches")))
    source, device, dtype = binding.source, binding.device, DTYPES[kind.dtype]

    def run() -> None:
        valid = 0
        for i in micro_batches:
            _, labels = source.load(binding.samples(i, binding.step), start, start + length)
            valid += int((labels != IGNORED).sum())
        slots[target] = torch.tensor(valid, dtype=dtype, device=device)

    return run


def _range(binding: Binding, instruction: Instruction) -> tuple[int, int]:
    """First position and length of this rank's part of the sequence; its context slice when not written out."""
    share = int(binding.plan.setting("train.sequence")) // binding.plan.mesh.size("context")
    length = binding.number(instruction, "length", share)
    return binding.number(instruction, "start", f"@context*{length}"), length


def report(binding: Binding, instruction: Instruction) -> Action:
    """A scalar for the log; it is read as a number when the step ends."""
    name, source = str(instruction.attribute("name")), binding.registers.read(instruction.reads[0])
    slots, reports = binding.slots, binding.reports

    def run() -> None:
        reports[name] = slots[source].clone()

    return run
