"""Fewer of the layers that are alike: a smaller plan that all proofs but that of memory may read in place of the whole.

A block is A S(l) S(l+1) ... S(h) B, where S(k) names registers, buffers and units of layers k-r to k+r. Then a name of
any layer is met by at most 2r + 1 copies in a row, by A only where its layer is at most l+r, by B only from h-r on. So
with 2r + 1 copies or more each name has its like in every block: one that the same instructions meet in the same order,
beside others that are like those beside it. What a proof says of names, of pairs of names that meet and of the order in
which they do, it says of their likes. Everything else of the layers that are left out (buckets, parameters, buffers,
their own blocks, and when these are called) is compared with that of a layer that stays.

Whatever is not of this form is proven as it stands, and so is a plan whose smaller one has a finding: its places would
be those of other layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from titan.compiler.plan.alike import PARAMETER, dotted
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.listing import Listing, Renaming, Stretch, centre, layers_of, names_of, stretches, text
from titan.compiler.plan.program import Block, BlockCall, Bucket, Buffer, Parameter, Plan, Role
from titan.compiler.plan.segment import parse_unit
from titan.compiler.verify.findings import crosses_programs

T = TypeVar("T")


class _Whole(Exception):
    """The plan is not of the form, or leaving out layers would not make it smaller."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Layers from `low` to `high` are alike; `dropped` are left out. `reach`: r of the proof above."""

    low: int
    high: int
    reach: int

    @property
    def dropped(self) -> range:
        return range(self.low + 2 * self.reach + 1, self.high + 1)


def fewer(plan: Plan) -> Plan | None:
    """The plan with as few layers of each kind as show all that its layers do; None where that is the plan itself."""
    try:
        runs = _runs(plan)
        return _Cut(plan, runs).plan() if runs else None
    except _Whole:
        return None


def _runs(plan: Plan) -> tuple[_Run, ...]:
    """What is repeated in all blocks that run those layers."""
    found: list[_Run] = []
    for stretch in _repeated(plan):
        layer = _layer(stretch)
        last = layer + stretch.step * (stretch.times - 1)
        named = [n for i in stretch.instructions for name in names_of(i) for n in layers_of(name)]
        run = _Run(min(layer, last), max(layer, last), max(abs(n - layer) for n in named))
        if any(i.group and crosses_programs(plan, i.group) for i in stretch.instructions):
            raise _Whole
        for other in [r for r in found if r.low <= run.high and run.low <= r.high]:
            found.remove(other)
            run = _Run(max(run.low, other.low), min(run.high, other.high), max(run.reach, other.reach))
        found.append(run)
    return tuple(sorted((r for r in found if len(r.dropped) > 2 * r.reach), key=lambda r: r.low))


def _repeated(plan: Plan) -> Iterator[Stretch]:
    for block in (block for role in plan.roles for block in role.blocks):
        listed = text(block.instructions)  # what is a renaming of a list repeats nothing: that was written out
        yield from (stretch for stretch in stretches(listed) if stretch.times > 1)


def _layer(stretch: Stretch) -> int:
    """The layer of a stretch that is repeated, where it first stands."""
    layers = {layer for layer in centre(stretch.instructions) if layer is not None}
    if len(layers) != 1 or abs(stretch.step) != 1:
        raise _Whole
    return layers.pop()


class _Cut:
    """One plan without some layers; the others are numbered anew."""

    def __init__(self, source: Plan, runs: tuple[_Run, ...]) -> None:
        self.source, self.runs = source, runs
        self.dropped = frozenset(layer for run in runs for layer in run.dropped)
        self.stay = Renaming(self.number)
        self.of_lowest = {layer: run.low for run in runs for layer in range(run.low, run.high + 1)}
        self.like = {layer: Renaming.by(low - layer) for layer, low in self.of_lowest.items()}

    def number(self, layer: int) -> int:
        """The number of a layer that stays."""
        if layer in self.dropped:
            raise _Whole
        return layer - sum(len(run.dropped) for run in self.runs if run.high < layer)

    def plan(self) -> Plan:
        source = self.source
        self.same(source.buckets, lambda bucket: f".{bucket.name}", self._bucket)
        self.same(source.parameters, lambda parameter: dotted(parameter.name), self._parameter)
        return replace(
            source,
            buckets=tuple(self._bucket(b, self.stay) for b in source.buckets if self.stays(f".{b.name}")),
            parameters=tuple(self._parameter(p, self.stay) for p in source.parameters if self.stays(dotted(p.name))),
            roles=tuple(self.role(role) for role in source.roles),
        )

    def stays(self, name: str) -> bool:
        return self.dropped.isdisjoint(layers_of(name))

    def alike(self, name: str) -> int | None:
        """The layer in a name when it is one of a run's."""
        found = [layer for layer in layers_of(name) if layer in self.of_lowest]
        if len(set(found)) > 1:
            raise _Whole
        return found[0] if found else None

    def same(self, items: Iterable[T], name: Callable[[T], str], renamed: Callable[[T, Renaming], T]) -> None:
        """What belongs to the layers of a run is the same for each of them, in the same order."""
        found: dict[int, list[T]] = {}
        for item in items:
            layer = self.alike(name(item))
            if layer is not None:
                found.setdefault(layer, []).append(renamed(item, self.like[layer]))
        for layer, low in self.of_lowest.items():
            if found.get(layer) != found.get(low):
                raise _Whole

    @staticmethod
    def _bucket(bucket: Bucket, renaming: Renaming) -> Bucket:
        return replace(bucket, name=renaming.name(f".{bucket.name}")[1:])

    @staticmethod
    def _parameter(parameter: Parameter, renaming: Renaming) -> Parameter:
        name = PARAMETER.sub(lambda m: f"layers.{renaming.layer(int(m[1]))}", parameter.name)
        return replace(parameter, name=name, bucket=renaming.name(f".{parameter.bucket}")[1:])

    @staticmethod
    def _buffer(buffer: Buffer, renaming: Renaming) -> Buffer:
        return replace(buffer, name=renaming.name(buffer.name))

    # -- programs -----------------------------------------------------------------------------------------------------

    def role(self, role: Role) -> Role:
        self.same(role.buffers, lambda buffer: buffer.name, self._buffer)
        own = [block for block in role.blocks if self.alike(block.name) is not None]
        self.same(own, lambda block: block.name, self._own)
        blocks = []
        for block in role.blocks:
            if self.alike(block.name) is not None:
                blocks += [self._own(block, self.stay)] if self.stays(block.name) else []
            else:
                blocks.append(self.block(block))
        return replace(
            role,
            layers=tuple(self.chunk(layers) for layers in role.layers),
            buffers=tuple(self._buffer(b, self.stay) for b in role.buffers if self.stays(b.name)),
            blocks=tuple(blocks),
            orders=tuple((name, self.order(calls)) for name, calls in role.orders),
        )

    def chunk(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        """Layers of a chunk, which holds all of a run or none."""
        for run in self.runs:
            held = [layer for layer in layers if run.low <= layer <= run.high]
            if held and held != list(range(run.low, run.high + 1)):
                raise _Whole
        return tuple(self.number(layer) for layer in layers if layer not in self.dropped)

    def order(self, calls: Sequence[BlockCall]) -> tuple[BlockCall, ...]:
        """Blocks of a layer are called at the same places among the calls of no layer."""
        others = 0
        places: list[tuple[BlockCall, int]] = []
        for call in calls:
            others += self.alike(call.block) is None
            places.append((call, others))

        def renamed(place: tuple[BlockCall, int], renaming: Renaming) -> tuple[BlockCall, int]:
            return place[0]._replace(block=renaming.name(place[0].block)), place[1]

        self.same(places, lambda place: place[0].block, renamed)
        return tuple(BlockCall(self.stay.name(block), given) for block, given in calls if self.stays(block))

    def _own(self, block: Block, renaming: Renaming) -> Block:
        """A block of one layer, which names no other."""
        (layer,) = set(layers_of(block.name))
        if any(n != layer for i in block.instructions for name in names_of(i) for n in layers_of(name)):
            raise _Whole
        instructions = renaming.instructions(block.instructions)
        return replace(block, name=renaming.name(block.name), instructions=instructions)

    def block(self, block: Block) -> Block:
        parts, name = stretches(block.instructions), self.stay.name(block.name)
        if len(parts) == 1:
            return replace(block, name=name, instructions=tuple(map(self.listed, parts[0].instructions)))
        repeated = [part for part in parts if part.times > 1]
        onward = repeated[0].step > 0
        if any((part.step > 0) != onward for part in repeated):
            raise _Whole
        passed: set[_Run] = set()
        found = []
        for part in parts:
            run = self.inside(part) if part.times > 1 else None
            renaming = self.beside(passed, onward)
            times = part.times - (len(run.dropped) if run else 0)
            moved = Stretch(renaming.instructions(part.instructions), times, part.step)
            found.append(moved)
            passed |= {run} if run else set()
        return replace(block, name=name, instructions=tuple(Listing(tuple(found))))

    def inside(self, part: Stretch) -> _Run | None:
        """The run of which a stretch is."""
        layer = _layer(part)
        last = layer + part.step * (part.times - 1)
        low, high = min(layer, last), max(layer, last)
        return next((run for run in self.runs if low <= run.low and run.high <= high), None)

    def beside(self, passed: set[_Run], onward: bool) -> Renaming:
        """Numbers in a part of a block: above a run it may reach into the upper end of what is left out."""

        def number(layer: int) -> int:
            if layer not in self.dropped:
                return self.number(layer)
            run = next(run for run in self.runs if layer in run.dropped)
            before = sum(len(other.dropped) for other in self.runs if other.high < run.low)
            if (run in passed) != onward or layer < run.high - run.reach:
                raise _Whole
            return layer - before - len(run.dropped)

        return Renaming(number)

    def listed(self, instruction: Instruction) -> Instruction:
        """An instruction outside layers, which may list what each of them has."""
        if parse_unit(instruction.unit)[1] in self.dropped:
            raise _Whole
        names = (instruction.writes, instruction.reads, instruction.updates)
        if all(self.stays(name) for listed in names for name in listed):
            return self.stay.instruction(instruction)
        for listed in names:
            self.same(listed, str, lambda name, renaming: renaming.name(name))
        writes, reads, updates = (tuple(name for name in listed if self.stays(name)) for listed in names)
        return self.stay.instruction(replace(instruction, writes=writes, reads=reads, updates=updates))
