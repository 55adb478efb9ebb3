"""The walk over a block, storage by storage: what is alive at once while its instructions run.

Registers are names of storages. Where two registers share one (a gradient that is handed on, a weight frame that keeps
values of the frame), it is alive as long as one of them is. Sharing is followed inside a block; what lives on after it
is counted by its registers' sizes, so blocks add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import field
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.instruction import base_name
from titan.compiler.plan.listing import Renaming, Stretch, stretches, went_on
from titan.compiler.plan.opcodes import ASYNCHRONOUS
from titan.compiler.plan.segment import Segment, parse_unit
from titan.compiler.plan.staging import NOTHING, Staging

if TYPE_CHECKING:
    from titan.compiler.plan.inside import Inside
    from titan.compiler.plan.instruction import Instruction
    from titan.compiler.plan.program import Block, Role
    from titan.compiler.plan.sizes import Sizes

Place = tuple[str, int]  # a register and the number of a value in it


@dataclass(frozen=True, slots=True)
class Profile:
    """A block relative to its beginning: net change, and the instruction where registers plus workspace are highest."""

    change: int
    height: int  # live registers there
    workspace: int
    index: int


@dataclass
class Walk:
    """`live` bytes of storages relative to the block's beginning; `change`: the same by the sizes of registers,
    whatever they share, so that all blocks of an order add up.

    `contents`: storages of the registers that may share one, by number; `holders`: how many registers hold a storage.
    """

    sizes: Sizes
    live: int = 0
    change: int = 0
    contents: dict[str, list[int]] = field(default_factory=dict)
    bytes: list[int] = field(default_factory=list)
    holders: list[int] = field(default_factory=list)

    def free(self, name: str) -> None:
        size, found = self.sizes.register(name), self.contents.pop(name, None) if self.contents else None
        self.change -= size
        if found is None:
            self.live -= size
            return
        for storage in found:
            self.holders[storage] -= 1
            if not self.holders[storage]:
                self.live -= self.bytes[storage]

    def rename(self, pending: str, name: str) -> None:
        if pending in self.contents:
            self.contents[name] = self.contents.pop(pending)

    def write(self, instruction: Instruction, inside: Inside | None = None) -> None:
        size = sum(map(self.sizes.register, instruction.writes))
        self.change += size
        if inside is not None and inside.shares:
            self._write_shared(instruction, inside)
        else:
            self.live += size

    def hold(self, size: int) -> None:
        """Bytes that no register names."""
        self.live += size
        self.change += size

    def _write_shared(self, instruction: Instruction, inside: Inside) -> None:
        """The writes of a backward, whose values may be storages that are there already."""
        segment = self.sizes.plan.segment_table[parse_unit(instruction.unit)[0]]
        given = _given(segment, instruction)
        made: dict[int, int] = {}
        writes = list(instruction.writes)
        roots = [(root,) for root in inside.gradients]
        for name, values in zip(writes, (*roots, inside.frame), strict=False):
            held = []
            for root in values:
                if isinstance(root, int):
                    storage = made.get(root)
                    if storage is None:
                        storage = made[root] = self._new(inside.sizes[root])
                        self.live += inside.sizes[root]
                elif root in given:
                    storage = self._storage(given[root])
                else:
                    continue
                self.holders[storage] += 1
                held.append(storage)
            self.contents[name] = held

    def _new(self, size: int) -> int:
        self.bytes.append(size)
        self.holders.append(0)
        return len(self.bytes) - 1

    def _storage(self, place: Place) -> int:
        """The storage of a value of a register; that of a register not seen before is its own."""
        name, number = place
        found = self.contents.get(name)
        if found is None:
            found = self.contents[name] = [self._new(size) for size in self.sizes.values(name)]
            for storage in found:
                self.holders[storage] = 1
        return found[number]


@dataclass
class _Pending:
    """What the transport holds for collectives under way. One that a block waits for without having issued it was
    issued by another block of the role."""

    sizes: Sizes
    role: Role | None
    under_way: dict[str, Staging] = field(default_factory=dict)

    def begin(self, instruction: Instruction) -> Staging:
        found = self.under_way[instruction.writes[0]] = self.sizes.staged(instruction)
        return found

    def end(self, name: str) -> Staging:
        found = self.under_way.pop(name, None)
        if found is None:
            found = self.sizes.issued(self.role).get(base_name(name), NOTHING) if self.role else NOTHING
        return found


def _given(segment: Segment, instruction: Instruction) -> dict[str, Place]:
    """Where the operands of a backward are: gradients of outputs (`d.x`), kept values."""
    names = list(instruction.reads)
    outputs = [segment.final(v) for v in segment.outputs if v in segment.differentiable]
    found: dict[str, Place] = {f"d.{value}": (name, 0) for value, name in zip(outputs, names, strict=False)}
    carried = str(instruction.attribute("carry"))
    first = len(outputs) + (carried.count(",") + 1 if carried else 0)
    kept = (*segment.kept_inputs, *segment.kept_outputs)
    found |= {value: (name, 0) for value, name in zip(kept, names[first:], strict=False)}
    for values, name in zip(segment.pieces.values(), names[first + len(kept) :], strict=False):
        found |= {value: (name, number) for number, value in enumerate(values)}
    return found


class Moment(NamedTuple):
    """While an instruction runs: bytes of storages that registers hold, and bytes beside them."""

    place: int  # among the instructions
    live: int
    workspace: int


def moments(
    instructions: Iterable[Instruction],
    sizes: Sizes,
    role: Role | None = None,
) -> Iterator[Moment]:
    """The walk over instructions, relative to its beginning, but for those that only end lives. `role`: where what is
    waited for here may have been issued."""
    return map(Moment._make, _moments(instructions, Walk(sizes), _Pending(sizes, role)))


def _moments(instructions: Iterable[Instruction], walk: Walk, pending: _Pending) -> Iterator[tuple[int, int, int]]:
    """`walk` and `pending` are left as they are at the end."""
    sizes, chosen = walk.sizes, walk.sizes.plan.adaptive
    for place, instruction in enumerate(instructions):
        if chosen and not sizes.runs(instruction):
            continue
        opcode = instruction.opcode
        if opcode == "free":
            for name in instruction.reads:
                walk.free(name)
        elif opcode == "wait":
            staged = pending.end(instruction.reads[0])
            if instruction.writes:
                walk.rename(instruction.reads[0], instruction.writes[0])
            yield place, walk.live, staged.landing
            if staged is not NOTHING:
                walk.hold(-staged.held)
        elif instruction.unit:
            before, inside = walk.live, sizes.inside(instruction)
            walk.write(instruction, inside)
            yield place, walk.live, max(0, before + inside.peak - walk.live)
        else:
            walk.write(instruction)
            if opcode in ASYNCHRONOUS:
                staged = pending.begin(instruction)
                if staged is not NOTHING:
                    walk.hold(staged.held)
            yield place, walk.live, sizes.workspace(instruction)


def _renamed(renaming: Renaming, name: str) -> str:
    return renaming.name(name)


def block_profile(block: Block, sizes: Sizes, role: Role | None = None) -> Profile:
    """Registers count from the instruction that issues their write (a receive too) to the end of their `free`."""
    profiler = _Profiler(sizes, role)
    for stretch in stretches(block.instructions):
        profiler.add(stretch)
    return Profile(profiler.walk.change, profiler.top.live, profiler.top.workspace, profiler.top.place)


class _Profiler:
    """The walk over a block, stretch by stretch. Of one that is repeated copies are walked until one does what the one
    before has done; the rest do that too."""

    def __init__(self, sizes: Sizes, role: Role | None) -> None:
        self.sizes, self.walk, self.pending = sizes, Walk(sizes), _Pending(sizes, role)
        self.top, self.most, self.place = Moment(0, 0, 0), -1, 0

    def add(self, stretch: Stretch) -> None:
        if stretch.times == 1:
            self._see(self._copy(stretch.instructions))
            return
        walk, done = self.walk, (0, 0, Moment(-1, 0, 0))
        for number in range(stretch.times):
            live, change, contents, under_way = (
                walk.live, walk.change, dict(walk.contents), dict(self.pending.under_way),
            )  # fmt: skip
            top, place = self._copy(stretch.copy(number)), self.place
            self._see(top)
            before, done = done, (walk.live - live, walk.change - change, top._replace(live=top.live - live, place=0))
            if done == before:
                rest = stretch.times - number - 1
                self.place += rest * len(stretch.instructions)
                walk.live, walk.change = walk.live + rest * done[0], walk.change + rest * done[1]
                went_on(walk.contents, contents, stretch, rest, _renamed)
                went_on(self.pending.under_way, under_way, stretch, rest, _renamed)
                self._see(top._replace(live=top.live + rest * done[0], place=top.place + self.place - place))
                return

    def _copy(self, instructions: tuple[Instruction, ...]) -> Moment:
        """Walks on; the highest moment on the way."""
        top, most = Moment(0, 0, 0), -inf
        for place, live, workspace in _moments(instructions, self.walk, self.pending):
            if live + workspace > most:
                top, most = Moment(place + self.place, live, workspace), live + workspace
        found = top if most > -inf else Moment(self.place, self.walk.live, 0)
        self.place += len(instructions)
        return found

    def _see(self, moment: Moment) -> None:
        if moment.live + moment.workspace > self.most:
            self.top, self.most = moment, moment.live + moment.workspace
