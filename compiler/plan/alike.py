"""Roles that are alike: they run the same blocks, on other layers.

The ranks of a long pipeline hold equal numbers of equal layers. Their blocks differ in nothing but the layers in the
names of registers, buffers and units; only their orders differ more. So what is said of the blocks of one of them, and
of the buckets, parameters and buffers that these name, holds for all of them, renamed.

Roles are alike when a renaming of layers, one to one, makes the blocks and buffers of one those of the other, and the
buckets and parameters of every layer that they name are those of the layer that it becomes. A role stands for itself
where it has to do with more than that: where it holds what belongs to no layer (embedding, head, the loss), or names a
group that joins certain ranks of the pipeline. Where names of types or segments hold a layer no roles are alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.listing import LAYER, NAMES, Renamed, Renaming, distinct, layers_of, names_of, stretches

if TYPE_CHECKING:
    from titan.compiler.plan.instruction import Instruction
    from titan.compiler.plan.operators import Attribute
    from titan.compiler.plan.program import Block, Bucket, Buffer, Parameter, Plan, Role

PARAMETER = re.compile(r"^layers\.(\d+)(?=\.)")  # begins the names of what belongs to a layer
_DIGITS = re.compile(r"\d+")
_OPERANDS = attrgetter("writes", "reads", "updates")
_UNIT, _ATTRIBUTES, _KIND = attrgetter("unit"), attrgetter("attributes"), attrgetter("opcode", "group", "stream")
_END = ":"  # between names: no layer reaches over it
Layers = dict[int, int]  # of one role -> of the other


@dataclass(frozen=True)
class Like:
    """A role, and the first of the plan that is like it (itself, where none before it is); their blocks correspond in
    order. `renaming` gives names of the first one this role's layers."""

    role: Role
    first: Role
    renaming: Renaming

    @cached_property
    def blocks(self) -> dict[str, Block]:
        """By the name of a block of this role, that of the first one."""
        return {mine.name: other for mine, other in zip(self.role.blocks, self.first.blocks, strict=True)}

    def instruction(self, block: str, index: int) -> Instruction:
        """One instruction of a block of this role; the rest of the block need not be written out for it."""
        found = self.blocks[block].instructions[index]
        return found if self.first is self.role else self.renaming.instruction(found)


def alone(plan: Plan) -> tuple[Like, ...]:
    """Every role stands for itself."""
    same = Renaming.by(0)
    return tuple(Like(role, role, same) for role in plan.roles)


@lru_cache(NAMES)
def dotted(name: str) -> str:
    """A parameter's name with its layer as registers have it: `layers.5.norm` -> `.l5.norm`."""
    return PARAMETER.sub(lambda m: f".l{m[1]}", name)


def alike(plan: Plan) -> tuple[Like, ...]:
    """For each role of the plan, in order, which one stands for it."""
    same = Renaming.by(0)
    if len(plan.roles) == 1 or any(layers_of(dotted(name)) for name in _fixed(plan)):
        return alone(plan)
    surroundings = _Surroundings(plan)
    firsts: list[_Written] = []
    found: list[Like] = []
    for role in plan.roles:
        like = Like(role, role, same)
        if surroundings.only_layers(role):
            written = _Written(role)
            renamed = ((first, surroundings.renaming(first, written)) for first in firsts)
            like = next((Like(role, first.role, r) for first, r in renamed if r is not None), like)
            if like.first is role and surroundings.told(written):
                firsts.append(written)
        found.append(like)
    return tuple(found)


def _fixed(plan: Plan) -> Iterator[str]:
    """Names that mean the same to all roles."""
    yield from (name for name, _ in plan.tensors)
    yield from (group.name for group in plan.groups)
    for segment in plan.segments:
        yield segment.name
        yield from segment.parameters


class _Text:
    """A block as two lists, made when they are asked for: the form of every instruction, and all names that may hold a
    layer. `of` is the list that it is in other layers, `layer` gives these by those of the list."""

    def __init__(self, block: Block) -> None:
        self.listed = self.of = block.instructions
        self.layer: Callable[[int], int] = int
        if isinstance(self.listed, Renamed):
            self.of, self.layer = self.listed.of, self.listed.renaming.layer

    @cached_property
    def form(self) -> list[object]:
        return _form(self.listed)

    @cached_property
    def names(self) -> list[str]:
        return _names(self.listed)

    @cached_property
    def told(self) -> frozenset[int]:
        """Layers of the list `of` which it is a renaming."""
        names = self.names if self.of is self.listed else _names(self.of)
        return frozenset(map(int, LAYER.findall(_END.join(names))))

    def becomes(self, other: _Text, layers: Layers, renaming: Renaming) -> bool:
        """Whether the other block is this one renamed. Of two renamings of one list no instruction is looked at."""
        if self.of is other.of and all(layers.get(self.layer(n)) == other.layer(n) for n in self.told):
            return True
        return self.form == other.form and list(map(renaming.name, self.names)) == other.names


class _Written:
    """A role's blocks."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.texts = [_Text(block) for block in role.blocks]
        names = "\n".join([block.name for block in role.blocks])
        self.heads = _DIGITS.sub("#", names), [block.parameters for block in role.blocks]

    @cached_property
    def groups(self) -> frozenset[str]:
        """Groups that are named."""
        return frozenset(i.group for block in self.role.blocks for i in distinct(block.instructions))

    @cached_property
    def _written(self) -> frozenset[str]:
        """Layers that are named, as they are written."""
        names = set[str]().union(*[text.names for text in self.texts])
        return frozenset(LAYER.findall(_END.join(names)))

    @cached_property
    def layers(self) -> frozenset[int]:
        """Layers that are named."""
        return frozenset(map(int, self._written))

    @property
    def plain(self) -> bool:
        """Whether every layer is written as a renaming writes it: `.l5`, not `.l05`."""
        return all(str(int(n)) == n for n in self._written)

    @cached_property
    def moves(self) -> frozenset[tuple[str, int, int]]:
        """(name, layers by which each copy is moved, copies)"""
        repeated = [s for text in self.texts for s in stretches(text.listed) if s.times > 1]
        return frozenset((name, s.step, s.times) for s in repeated for i in s.instructions for name in names_of(i))


def _names(listed: Sequence[Instruction]) -> list[str]:
    names: list[str] = []
    for stretch in stretches(listed):
        names += chain.from_iterable(chain.from_iterable(map(_OPERANDS, stretch.instructions)))
        names += map(_UNIT, stretch.instructions)
        names += [str(found[-2][1]) for found in map(_ATTRIBUTES, stretch.instructions) if found and _framed(found)]
    return names


def _form(listed: Sequence[Instruction]) -> list[object]:
    form: list[object] = []
    for stretch in stretches(listed):
        form += (len(stretch.instructions), stretch.times, stretch.step)
        form += map(len, chain.from_iterable(map(_OPERANDS, stretch.instructions)))
        form += map(_KIND, stretch.instructions)
        for found in map(_ATTRIBUTES, stretch.instructions):
            form.append((*found[:-2], found[-2][0], found[-1]) if found and _framed(found) else found)
    return form


def _framed(attributes: tuple[tuple[str, Attribute], ...]) -> bool:
    """Whether they end with the name of a frame and the tiers in which the instruction runs."""
    return len(attributes) > 1 and attributes[-1][0] == "when" and isinstance(attributes[-2][1], str)


class _Surroundings:
    """What a plan says of each layer beside the programs, whatever its number."""

    def __init__(self, plan: Plan) -> None:
        self.restricted = {group.name for group in plan.groups if group.pipeline}
        self.buckets: dict[int, list[tuple[object, ...]]] = {}
        self.parameters: dict[int, list[tuple[object, ...]]] = {}
        self.homes: dict[int, list[tuple[int, ...]]] = {}
        self.apart: set[int] = set()  # layers of which nothing is said, for it is not of one layer alone
        self.elsewhere: set[int] = set()  # stages that hold what belongs to no layer
        for bucket in plan.buckets:
            self._bucket(bucket)
        for parameter in plan.parameters:
            self._parameter(parameter)

    def _bucket(self, bucket: Bucket) -> None:
        layers, name = _parted(f".{bucket.name}")
        if len(layers) != 1:
            self.apart.update(layers)
            self.elsewhere.update(bucket.homes)
            return
        groups = (*bucket.sums, bucket.replicas, bucket.shards, bucket.uncounted)
        if len(bucket.homes) != 1 or not self.restricted.isdisjoint(groups):
            self.apart.update(layers)
        form = (name, bucket.elements, bucket.dtype, groups, len(bucket.sums), bucket.sharded)
        self.buckets.setdefault(layers[0], []).append(form)
        self.homes.setdefault(layers[0], []).append(bucket.homes)

    def _parameter(self, p: Parameter) -> None:
        (named, name), (held, bucket) = _parted(dotted(p.name)), _parted(f".{p.bucket}")
        if len(named) != 1 or named != held:
            self.apart.update((*named, *held))
            return
        form = (name, p.shape, p.rows, p.tensor, bucket, p.offset, p.decay, p.initializer)
        self.parameters.setdefault(named[0], []).append(form)

    def only_layers(self, role: Role) -> bool:
        """Whether a role holds layers and nothing else."""
        held = {layer for chunk in role.layers for layer in chunk}
        stage = role.pipeline
        return stage not in self.elsewhere and all(
            layer in held for layer, homes in self.homes.items() for home in homes if stage in home
        )

    def told(self, written: _Written) -> bool:
        """Whether all is said of what a role names."""
        return (
            self.apart.isdisjoint(written.layers)
            and not (self.restricted and self.restricted.intersection(written.groups))
            and all(layers_of(buffer.name) for buffer in written.role.buffers)
            and written.plain
        )

    def renaming(self, one: _Written, other: _Written) -> Renaming | None:
        """The renaming that makes one role the other."""
        layers = _layers(one.role, other.role, one.layers) if one.heads == other.heads else None
        if layers is None or not self._same(layers, one.role.pipeline, other.role.pipeline):
            return None
        renaming = Renaming(layers.__getitem__)
        try:
            for name, step, times in one.moves:
                for layer in layers_of(name):
                    if any(layers[layer + step * n] != layers[layer] + step * n for n in range(times)):
                        return None
            same = [_buffer(renaming.name(b.name), b) for b in one.role.buffers] == [
                _buffer(b.name, b) for b in other.role.buffers
            ] and all(a.becomes(b, layers, renaming) for a, b in zip(one.texts, other.texts, strict=True))
        except KeyError:  # a layer that is neither held nor beside one that is
            return None
        return renaming if same else None

    def _same(self, layers: Layers, one: int, other: int) -> bool:
        return all(
            self.apart.isdisjoint((a, b))
            and self.buckets.get(a) == self.buckets.get(b)
            and self.parameters.get(a) == self.parameters.get(b)
            and [one in home for home in self.homes.get(a, ())] == [other in home for home in self.homes.get(b, ())]
            for a, b in layers.items()
        )


def _layers(one: Role, other: Role, named: frozenset[int]) -> Layers | None:
    """Which layer becomes which: those held, in order, and those beside them that are named."""
    if [*map(len, one.layers)] != [*map(len, other.layers)]:
        return None
    found: Layers = {}
    for a, b in zip(one.layers, other.layers, strict=True):
        pairs = list(zip(a, b, strict=True))
        if a:
            pairs += [(x, y) for x, y in ((a[0] - 1, b[0] - 1), (a[-1] + 1, b[-1] + 1)) if x in named]
        if any(found.setdefault(x, y) != y for x, y in pairs):
            return None
    return found if len(set(found.values())) == len(found) else None


def _buffer(name: str, buffer: Buffer) -> tuple[object, ...]:
    return (name, buffer.kind, buffer.dtype, buffer.elements, buffer.place)


@lru_cache(NAMES)
def _parted(name: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Layers in a name, and what is around them: `.l5.norm` -> (5,), ("", ".norm")."""
    parts = LAYER.split(name)
    return tuple(map(int, parts[1::2])), tuple(parts[::2])
