"""What the blocks of an order do to registers, thread by thread.

What a block does to the registers of one micro-batch depends on nothing but what earlier calls did to them, as long as
no pending instruction of one micro-batch borrows registers of another, or of the step. Then an order falls apart into
threads: the pieces of blocks that one micro-batch meets, in order, and those that the step's own registers meet. Each
may be walked alone, and equal ones once: most micro-batches of a role, and of roles that are alike, have equal threads.

Of the step's thread pieces are left out that only look and have looked already since the last piece that does more:
they demand values, or that nothing is borrowed (a contribution to a gradient), and leave all states as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from titan.compiler.plan.threads import Met, Threads
from titan.compiler.verify.block_registers import Outline, split

STEP = -1  # the "micro-batch" of registers that belong to the whole step


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
        return Named(by_met({name: listed[1:] for name, listed in numbers.items()}), acting)


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

    batches: dict[Met, int]
    step: dict[str, int]

    def threads(self, threads: Threads) -> Iterator[tuple[int, ...]]:
        """The parts that each kind of micro-batch meets."""
        for kind in threads.kinds:
            yield tuple([self.batches[met] for met in kind])


def by_met(numbers: Mapping[str, tuple[int, ...]]) -> dict[Met, int]:
    """Numbers that blocks have for each of their parameters, by what a micro-batch meets."""
    found: dict[Met, int] = {}
    for name, listed in numbers.items():
        if len(listed) == 1:
            found[name] = listed[0]
        else:
            found |= {(name, place): number for place, number in enumerate(listed)}
    return found


class StepThread:
    """What the step's own registers meet in calls, as far as they were added."""

    def __init__(self, pieces: Pieces, acting: dict[str, int]) -> None:
        self.pieces, self.acting = pieces, acting
        self.parts: list[int] = []
        self.looked: set[int] = set()

    def add(self, called: Sequence[str]) -> StepThread:
        """Goes on by calls of some blocks."""
        acting = self.acting
        due = {name: step for name, step in acting.items() if step not in self.looked}
        for block in called:
            if block in due:
                self.parts.append(due[block])
                if due[block] in self.pieces.looks:
                    self.looked.add(due.pop(block))
                else:
                    self.looked.clear()
                    due = dict(acting)
        return self
