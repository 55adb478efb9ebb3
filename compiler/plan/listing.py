"""Lists of instructions in which stretches are repeated for layer after layer.

Layers of a kind have equal instructions but for the layer in the names of registers, buffers and units. So a list may
be kept as stretches: some instructions once, others once for many layers. Who reads it as a sequence sees every
instruction; who can do with one of each kind (sums, sizes, clocks, proofs) reads the stretches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from typing import TYPE_CHECKING, TypeVar, overload

from titan.compiler.plan.frozen import dataclass

if TYPE_CHECKING:
    from titan.compiler.plan.instruction import Instruction

K = TypeVar("K")
V = TypeVar("V")
NAMES = 1 << 18  # names whose layers are remembered
LAYER = re.compile(r"\.l(\d+)(?![^.:?])")  # `.l5` that is all of a name's part: `x.l5:i?`, `w.l5.experts`


@lru_cache(NAMES)
def layers_of(name: str) -> tuple[int, ...]:
    """Layers in a name: `x.l5:i` -> (5,)."""
    return tuple(int(found) for found in LAYER.findall(name)) if ".l" in name else ()


def names_of(instruction: Instruction) -> tuple[str, ...]:
    """All names of an instruction that may hold a layer."""
    frame = (instruction.frame,) if instruction.when else ()
    return (*instruction.writes, *instruction.reads, *instruction.updates, instruction.unit, *frame)


@lru_cache(NAMES)
def _first(name: str) -> tuple[str, int, str]:
    """A name around its first layer (-1: there is none): `x.l5:i` -> (`x`, 5, `:i`)."""
    found = LAYER.search(name)
    return (name[: found.start()], int(found[1]), name[found.end() :]) if found else (name, -1, "")


class _Names(dict[str, str]):
    """New names by old ones, found when they are asked for."""

    def __init__(self, layer: Callable[[int], int]) -> None:
        super().__init__()
        self.layer = layer

    def __missing__(self, name: str) -> str:
        found = name
        if ".l" in name:
            head, layer, rest = _first(name)
            if layer >= 0:
                found = f"{head}.l{self.layer(layer)}{self[rest] if '.l' in rest else rest}"
        self[name] = found
        return found


class Renaming:
    """Gives names and instructions other layers; names that were seen are remembered."""

    __slots__ = ("layer", "name")

    def __init__(self, layer: Callable[[int], int]) -> None:
        self.layer = layer
        self.name = _Names(layer).__getitem__

    @classmethod
    def by(cls, layers: int) -> Renaming:
        """Moves by a number of layers."""
        return cls(lambda layer: layer + layers)

    def instruction(self, i: Instruction) -> Instruction:
        name, attributes = self.name, i.attributes
        if i.when:
            attributes = tuple((k, name(str(v)) if k == "frame" else v) for k, v in attributes)
        writes, reads = tuple(map(name, i.writes)), tuple(map(name, i.reads))
        updates, unit = tuple(map(name, i.updates)) if i.updates else (), name(i.unit) if i.unit else ""
        return type(i)(i.opcode, writes, reads, updates, unit, i.group, i.stream, attributes)

    def instructions(self, listed: Iterable[Instruction]) -> tuple[Instruction, ...]:
        return tuple(map(self.instruction, listed))

    def same(self, one: Sequence[Instruction], other: Sequence[Instruction]) -> bool:
        """Whether the other instructions are the first ones renamed."""
        name = self.name
        return len(one) == len(other) and all(
            a.opcode == b.opcode
            and name(a.unit) == b.unit
            and tuple(map(name, a.reads)) == b.reads
            and tuple(map(name, a.writes)) == b.writes
            and tuple(map(name, a.updates)) == b.updates
            and (a.group, a.stream) == (b.group, b.stream)
            and (a.attributes == b.attributes or self.instruction(a) == b)
            for a, b in zip(one, other, strict=True)
        )


def copies(name: str, step: int, times: int) -> list[str]:
    """A name in every copy of a stretch."""
    return [name, *(Renaming.by(step * number).name(name) for number in range(1, times))]


@dataclass(frozen=True, slots=True)
class Stretch:
    """`instructions` that stand `times` times in a row, each time `step` layers on."""

    instructions: tuple[Instruction, ...]
    times: int = 1
    step: int = 0

    def __len__(self) -> int:
        return self.times * len(self.instructions)

    def copy(self, number: int) -> tuple[Instruction, ...]:
        """What stands there the given time, counted from 0."""
        return Renaming.by(self.step * number).instructions(self.instructions) if number else self.instructions


def centre(instructions: Sequence[Instruction]) -> list[int | None]:
    """The layer to which each instruction belongs: that of its unit; where nothing is computed the first that it
    names."""
    computes = any(i.unit for i in instructions)
    named = ((i.unit,) if computes else names_of(i) for i in instructions)
    return [next((layer for name in names for layer in layers_of(name)), None) for names in named]


class Listing(Sequence["Instruction"]):
    """A sequence of instructions, written as stretches; equal to every sequence of the same instructions."""

    def __init__(self, stretches: tuple[Stretch, ...]) -> None:
        self.stretches = stretches

    @cached_property
    def whole(self) -> tuple[Instruction, ...]:
        """Every instruction."""
        return tuple(chain.from_iterable(s.copy(n) for s in self.stretches for n in range(s.times)))

    def __len__(self) -> int:
        return sum(map(len, self.stretches))

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.whole)

    @overload
    def __getitem__(self, index: int) -> Instruction: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Instruction, ...]: ...
    def __getitem__(self, index: int | slice) -> Instruction | tuple[Instruction, ...]:
        return self.whole[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Listing) and self.stretches == other.stretches:
            return True
        return isinstance(other, (Listing, tuple)) and len(self) == len(other) and self.whole == tuple(other)

    def __hash__(self) -> int:
        return hash(self.whole)


class Renamed(Listing):
    """The instructions `of` another block in other layers, written out when they are read."""

    def __init__(self, of: tuple[Instruction, ...], renaming: Renaming) -> None:
        self.of, self.renaming = of, renaming

    def __reduce__(self) -> tuple[type[Listing], tuple[tuple[Stretch, ...]]]:
        """Another process gets it written out: it does not have the list that this is a renaming of."""
        return Listing, (self.stretches,)

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:  # type: ignore[override]
        return (Stretch(self.whole),)

    @cached_property
    def whole(self) -> tuple[Instruction, ...]:
        return self.renaming.instructions(self.of)

    def __len__(self) -> int:
        return len(self.of)


def went_on(
    table: dict[K, V],
    before: Mapping[K, V],
    stretch: Stretch,
    times: int,
    name: Callable[[Renaming, K], K],
    value: Callable[[V, int], V] = lambda found, number: found,
) -> None:
    """Does to a table by names what one copy of a stretch has done to it since `before` so many times more, in the
    layers that follow; `value` gives what then stands there."""
    gone = [key for key in before if key not in table]
    new = [(key, found) for key, found in table.items() if key not in before or before[key] is not found]
    for number in range(1, times + 1):
        renaming = Renaming.by(stretch.step * number)
        for key in gone:
            table.pop(name(renaming, key), None)
        for key, found in new:
            table[name(renaming, key)] = value(found, number)


def text(instructions: Sequence[Instruction]) -> Sequence[Instruction]:
    """The list that has been written, in whatever layers the given one is it."""
    return instructions.of if type(instructions) is Renamed else instructions


def stretches(instructions: Sequence[Instruction]) -> tuple[Stretch, ...]:
    """Of a list that is written out, one."""
    if type(instructions) is tuple:
        return (Stretch(instructions),)
    return instructions.stretches if isinstance(instructions, Listing) else (Stretch(tuple(instructions)),)


def weighted(instructions: Sequence[Instruction]) -> Iterator[tuple[Instruction, int]]:
    """One instruction of each kind that a list repeats, and how often it stands there; in whatever layer."""
    for stretch in stretches(text(instructions)):
        for instruction in stretch.instructions:
            yield instruction, stretch.times


def distinct(instructions: Sequence[Instruction]) -> Iterator[Instruction]:
    """One instruction of each kind that a list repeats: for what is equal in all layers of a kind."""
    return chain.from_iterable([stretch.instructions for stretch in stretches(text(instructions))])
