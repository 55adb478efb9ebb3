"""Whole buckets in registers: gathered from the shards of the right bucket, and of a micro-batch's whole gradient the
sum is scattered once, over the shard group, after everything was added to it.

That such a register is written before it is read, and not touched while it is borrowed, is proof (a)'s.
"""

from __future__ import annotations

from dataclasses import field

from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.instruction import Instruction, base_name
from titan.compiler.plan.program import Block, Plan, Role
from titan.compiler.verify.findings import Finding, at
from titan.compiler.verify.piece import Piece


@dataclass
class _Gradient:
    """What happened so far to one whole gradient."""

    place: tuple[Block, int]
    begun: int = 0
    added: int = 0
    scattered: int = 0


@dataclass
class _Whole:
    plan: Plan
    role: Role
    findings: list[Finding] = field(default_factory=list)
    gradients: dict[str, _Gradient] = field(default_factory=dict)

    def fail(self, code: str, message: str, place: tuple[Block, int]) -> None:
        self.findings.append(at(code, message, self.role, *place))

    def note(self, instruction: Instruction, place: tuple[Block, int]) -> None:
        opcode = instruction.opcode
        if opcode == "unshard" and instruction.reads:
            self.gather(instruction, place)
        elif opcode == "open_grad":
            found = self.gradient(instruction.writes[0], place)
            found.begun += 1
            if "g" not in self.plan.bucket_of(instruction.writes[0]).sharded:
                self.fail("T743", f"`{instruction.writes[0]}` is of a bucket whose gradients are not sharded", place)
        elif opcode == "reduce_grad" and instruction.reads:
            self.scatter(instruction, place)
        elif instruction.unit:
            for name in instruction.updates:
                if name.startswith("dw."):
                    self.add(name, place)

    def gradient(self, name: str, place: tuple[Block, int]) -> _Gradient:
        return self.gradients.setdefault(base_name(name), _Gradient(place))

    def add(self, name: str, place: tuple[Block, int]) -> None:
        found = self.gradient(name, place)
        found.added += 1
        if found.scattered:
            self.fail("T743", f"`{name}` is added to after its sum was scattered", place)

    def gather(self, instruction: Instruction, place: tuple[Block, int]) -> None:
        written, read = instruction.writes[0], instruction.reads[0]
        bucket = self.plan.bucket_of(read)
        kind = base_name(written).removeprefix("r.").partition(".")[0]
        if kind != "w" or self.plan.bucket_of(written) != bucket or not read.startswith("p."):
            self.fail("T746", f"`{written}` is not the whole of {read}", place)
        if "p" not in bucket.sharded or instruction.group != bucket.shards or instruction.updates:
            self.fail("T746", f"{read} is no shard over {instruction.group}", place)

    def scatter(self, instruction: Instruction, place: tuple[Block, int]) -> None:
        read, updated = instruction.reads[0], instruction.updates[0]
        bucket = self.plan.bucket_of(updated)
        found = self.gradient(read, place)
        found.scattered += 1
        if not read.startswith("dw.") or self.plan.bucket_of(read) != bucket or not updated.startswith("g."):
            self.fail("T743", f"`{read}` is not the whole gradient of {updated}", place)
        if (
            "g" not in bucket.sharded
            or instruction.group != bucket.shards
            or instruction.attribute("mode") != "reduce_scatter"
        ):
            self.fail("T743", f"the sum of `{read}` is scattered over {bucket.shards or 'nothing'}", place)

    def close(self) -> None:
        for name, found in self.gradients.items():
            for what, count in (("begun", found.begun), ("scattered", found.scattered)):
                if count != 1:
                    self.fail("T743", f"`{name}` is {what} {count} times for a micro-batch, not once", found.place)
            if not found.added:
                self.fail("T743", f"nothing is added to `{name}`", found.place)


def whole(plan: Plan, role: Role, pieces: tuple[Piece, ...]) -> list[Finding]:
    """Findings about one micro-batch, whose blocks run in the given order."""
    seen = _Whole(plan, role)
    for piece in pieces:
        for index, instruction in piece.instructions:
            seen.note(instruction, (piece.block, index))
    seen.close()
    return seen.findings
