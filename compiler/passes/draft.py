"""What is written of a block before parameters are gathered, gradients are summed, and the lives of registers end."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.listing import Renamed, Renaming
from titan.compiler.plan.segment import parse_unit

if TYPE_CHECKING:
    from titan.compiler.passes.overlap import Early


@dataclass(frozen=True)
class Draft:
    """A block before its registers end: `outlive` are those that later blocks read; `early` is issued before it."""

    name: str
    instructions: tuple[Instruction, ...]
    outlive: frozenset[str]
    by_tier: tuple[tuple[str, frozenset[str]], ...] = ()  # what outlives it beside, by recompute tier
    early: tuple[Early, ...] = ()

    @property
    def phase(self) -> str:
        return self.name.partition(".")[0]

    @property
    def chunk(self) -> str:
        return self.name.partition(".")[2]

    @cached_property
    def reads(self) -> frozenset[str]:
        """Buckets whose parameters are read."""
        return frozenset(n[2:] for i in self.instructions for n in i.reads if n.startswith("p."))

    @cached_property
    def runs(self) -> list[list[int]]:
        """Indices of the instructions that compute, by stretch."""
        return stretches(self.instructions)

    @cached_property
    def updates(self) -> frozenset[str]:
        """Buckets whose gradients are added to."""
        return frozenset(n[2:] for i in self.instructions for n in i.updates if n.startswith("g."))


@dataclass(frozen=True)
class Likeness:
    """What a rank does in the layers of another: from there to here, and back."""

    here: Renaming
    back: Renaming

    def instructions(self, found: tuple[Instruction, ...]) -> Renamed:
        return Renamed(found, self.here)

    def bucket(self, name: str) -> str:
        return self.here.name(f"p.{name}")[2:]

    def draft(self, draft: Draft, name: str) -> Twin:
        """A draft of that rank as one of this rank, called `name`."""
        early = tuple(replace(item, issue=self.here.instruction(item.issue)) for item in draft.early)
        return Twin(name, (), frozenset(), (), early, of=draft, like=self)


@dataclass(frozen=True, kw_only=True)
class Twin(Draft):
    """A draft `of` another rank as one of this rank. It is written there, and has no instructions of its own."""

    of: Draft
    like: Likeness

    @cached_property
    def reads(self) -> frozenset[str]:
        return frozenset(map(self.like.bucket, self.of.reads))

    @cached_property
    def runs(self) -> list[list[int]]:
        return self.of.runs

    @cached_property
    def updates(self) -> frozenset[str]:
        return frozenset(map(self.like.bucket, self.of.updates))


def stretches(instructions: tuple[Instruction, ...]) -> list[list[int]]:
    """Indices of compute instructions, one list for each stretch of one layer (or of embedding or head)."""
    runs: list[list[int]] = []
    before: object = None
    for index, instruction in enumerate(instructions):
        if not instruction.unit:
            continue
        name, layer = parse_unit(instruction.unit)
        instance = name.partition(".")[0] if layer is None else layer
        if instance != before:
            runs.append([])
        runs[-1].append(index)
        before = instance
    return runs
