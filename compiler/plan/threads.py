"""An order as each micro-batch meets it: its threads, the pieces of blocks that it meets, in turn.

A piece is a block with one of its parameters; pieces are numbered as blocks stand in a role, so that those of roles
that are alike correspond.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING

from titan.compiler.plan.frozen import dataclass

if TYPE_CHECKING:
    from titan.compiler.plan.program import Block, BlockCall, Role

Thread = tuple[int, ...]


@dataclass(frozen=True)
class Threads:
    """What each micro-batch meets in an order. `apart`: no call has the same micro-batch twice."""

    batches: dict[int, Thread]
    apart: bool

    def different(self) -> Iterator[Thread]:
        """Each thread that is there, once."""
        yield from dict.fromkeys(self.batches.values())


def pieces(blocks: Sequence[Block]) -> Iterator[tuple[Block, str]]:
    """Those of a role's blocks, as they are numbered: block and parameter."""
    return ((block, parameter) for block in blocks for parameter in block.parameters)


def legs(roles: Sequence[Role]) -> list[tuple[str, str]]:
    """The orders of roles, each with the longest one that it begins with in all of them ("": there is none) and that no
    other one goes on from; that one stands before it. So what both have in common need be walked but once."""
    names = [name for name, _ in roles[0].orders]
    taken: set[str] = set()
    found: list[tuple[str, str]] = []
    for name in sorted(names, key=lambda name: len(roles[0].order(name))):
        begun = [other for other, _ in found if other not in taken and all((other, name) in r.begun for r in roles)]
        taken.update(begun[-1:])
        found.append((name, begun[-1] if begun else ""))
    return found


def threads(role: Role) -> dict[str, Threads]:
    """By order."""
    numbers = count()
    own = {block.name: tuple(next(numbers) for _ in block.parameters) for block in role.blocks}
    taken: dict[str, defaultdict[int, list[int]]] = {}
    found: dict[str, Threads] = {}
    for name, before in legs((role,)):
        batches = taken[name] = taken[before] if before else defaultdict(list)
        first = len(role.order(before)) if before else 0
        apart = _take_apart(role.order(name)[first:], own, batches)
        listed = dict(zip(batches, map(tuple, batches.values()), strict=True))
        found[name] = Threads(listed, apart and (not before or found[before].apart))
    return found


def _take_apart(calls: Sequence[BlockCall], pieces: dict[str, Thread], found: dict[int, list[int]]) -> bool:
    """Adds to each micro-batch of `found` the pieces that it meets. Whether no call has the same one twice."""
    single = {block: own[0] for block, own in pieces.items() if len(own) == 1}
    apart = True
    for block, arguments in calls:
        if block in single:
            found[arguments[0]].append(single[block])
        else:
            apart = apart and len({*arguments}) == len(pieces[block])
            for argument, piece in zip(arguments, pieces[block], strict=True):
                found[argument].append(piece)
    return apart
