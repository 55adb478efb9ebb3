"""An order as each micro-batch meets it: its threads.

What a block does to the registers of one micro-batch depends on nothing but what earlier calls did to them, as long as
no pending instruction of one micro-batch borrows registers of another, or of the step. Then an order falls apart into
threads: the pieces of blocks that one micro-batch meets, in order, and those that the step's own registers meet. Each
may be walked alone, and equal ones once: most micro-batches of a role, and of roles that are alike, have equal threads.

Of the step's thread pieces are left out that only look and have looked already since the last piece that does more:
they demand values, or that nothing is borrowed (a contribution to a gradient), and leave all states as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from titan.compiler.plan.program import BlockCall, Role, called
from titan.compiler.verify.block_registers import Outline, split

T = TypeVar("T")
STEP = -1  # the "micro-batch" of registers that belong to the whole step


def legs(roles: Sequence[Role]) -> list[tuple[str, str]]:
    """The orders of roles, each with the longest one that it begins with in all of them ("": there is none) and that no
    other one goes on from; that one stands before it. So what both have in common need be walked but once."""
    names = [name for name, _ in roles[0].orders]
    taken: set[str] = set()
    found: list[tuple[str, str]] = []
    for name in sorted(names, key=lambda name: len(roles[0].order(name))):
        begun = [other for other, _ in found if other not in taken and _begins(roles, name, other)]
        taken.update(begun[-1:])
        found.append((name, begun[-1] if begun else ""))
    return found


def _begins(roles: Sequence[Role], name: str, other: str) -> bool:
    orders = ((role.order(name), role.order(other)) for role in roles)
    return all(len(few) < len(calls) and calls[: len(few)] == few for calls, few in orders)


def take_apart(calls: Sequence[BlockCall], pieces: Mapping[str, tuple[T, ...]], found: dict[int, list[T]]) -> bool:
    """Adds to each micro-batch of `found` the pieces that it meets; `pieces`: of each block, by parameter. Whether no
    call has the same micro-batch twice."""
    apart = True
    for block, arguments in calls:
        own = pieces[block]
        if len(own) == 1:
            found[arguments[0]].append(own[0])
        elif own:
            apart = apart and len({*arguments}) == len(own)
            for argument, piece in zip(arguments, own, strict=True):
                found[argument].append(piece)
    return apart


class Pieces:
    """Blocks by their parameters: `parts` are outlines with one set of masks each."""

    def __init__(self, outlines: Mapping[str, Outline]) -> None:
        self.parts: list[Outline] = []
        self.numbers: dict[str, tuple[int, ...]] = {}  # block -> its parts, that of the step first
        self.looks: set[int] = set()  # parts that leave all states as they are
        self.idle: set[int] = set()  # parts that touch nothing
        self.apart = all(_own(seen) for seen in outlines.values())
        for name, seen in outlines.items():
            first = len(self.parts)
            self.parts += (_part(seen, symbol) for symbol in seen.masks)
            self.numbers[name] = tuple(range(first, len(self.parts)))
            if _looks(self.parts[first]):
                masks = self.parts[first].masks[""]
                (self.looks if masks.touched or masks.reads or masks.changes else self.idle).add(first)

    def named(self, blocks: Mapping[str, str]) -> Named:
        """`blocks`: those of the pieces by the names that a role calls."""
        numbers = {name: self.numbers[block] for name, block in blocks.items()}
        acting = {name: listed[0] for name, listed in numbers.items() if listed[0] not in self.idle}
        return Named({name: listed[1:] for name, listed in numbers.items()}, acting)


def _own(seen: Outline) -> bool:
    """Whether what is pending at a block's end borrows of its own micro-batch only."""
    return all(
        split(name)[1] == split(token)[1] for token, lent in seen.lent.items() for names in lent for name in names
    )


def _part(seen: Outline, symbol: str) -> Outline:
    waits = {token: index for token, index in seen.waits.items() if split(token)[1] == symbol}
    lent = {token: names for token, names in seen.lent.items() if split(token)[1] == symbol}
    return replace(seen, masks={symbol: seen.masks[symbol]}, waits=waits, lent=lent)


def _looks(part: Outline) -> bool:
    (masks,) = part.masks.values()
    return not (part.waits or part.lent) and masks.value == masks.touched == masks.value_after


class Named(NamedTuple):
    """Parts of the blocks that a role calls, by name: those of micro-batches, and that of the step if it does
    anything."""

    batches: dict[str, tuple[int, ...]]
    step: dict[str, int]


class Threads:
    """Calls taken apart, as far as they were added. `apart`: whether they may be."""

    def __init__(self, pieces: Pieces, named: Named) -> None:
        self.pieces, self.named, self.apart = pieces, named, pieces.apart
        self.batches: defaultdict[int, list[int]] = defaultdict(list)
        self.step: list[int] = []
        self.looked: set[int] = set()

    def add(self, calls: Sequence[BlockCall]) -> Threads:
        """Goes on by some calls."""
        self.apart = take_apart(calls, self.named.batches, self.batches) and self.apart
        acting = self.named.step
        due = {name: step for name, step in acting.items() if step not in self.looked}
        for block in called(calls):
            if block in due:
                self.step.append(due[block])
                if due[block] in self.pieces.looks:
                    self.looked.add(due.pop(block))
                else:
                    self.looked.clear()
                    due = dict(acting)
        return self

    def all(self) -> Iterator[tuple[int, ...]]:
        """Each thread that is there, once."""
        yield tuple(self.step)
        yield from {tuple(thread): None for thread in self.batches.values()}
