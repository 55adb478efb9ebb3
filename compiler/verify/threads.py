"""An order as each micro-batch meets it: its threads.

What a block does to the registers of one micro-batch depends on nothing but what earlier calls did to them, as long as
no pending instruction of one micro-batch borrows registers of another, or of the step. Then an order falls apart into
threads: the pieces of blocks that one micro-batch meets, in order, and those that the step's own registers meet. Each
may be walked alone, and equal ones once: most micro-batches of a role, and of roles that are alike, have equal threads.

Of the step's thread pieces are left out that only look and have looked already since the last piece that does more:
they demand values, or that nothing is borrowed (a contribution to a gradient), and leave all states as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import itemgetter

from titan.compiler.plan.program import BlockCall
from titan.compiler.verify.block_registers import Outline, split

_BLOCK = itemgetter(0)  # of a call
STEP = -1  # the "micro-batch" of registers that belong to the whole step


class Pieces:
    """Blocks by their parameters, as outlines with one set of masks each, and what they do to the step's registers."""

    def __init__(self, outlines: Mapping[str, Outline]) -> None:
        self.parts = [_part(seen, symbol) for seen in outlines.values() for symbol in seen.block.parameters]
        self.steps = {name: _part(seen, "") for name, seen in outlines.items()}
        self.looks = {name for name, part in self.steps.items() if _looks(part)}  # all states are left as they are
        self.idle = {name for name in self.looks if _idle(self.steps[name])}
        self.apart = all(_own(seen) for seen in outlines.values())


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


def _idle(part: Outline) -> bool:
    """Whether nothing is touched."""
    (masks,) = part.masks.values()
    return not (masks.touched or masks.reads or masks.changes)


class StepThread:
    """The blocks that the step's own registers meet, as far as calls were added."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = pieces
        self.blocks: list[str] = []
        self.looked: set[str] = set()

    def add(self, calls: Iterable[BlockCall], named: Mapping[str, str]) -> StepThread:
        """Goes on by some calls; `named`: the blocks of the pieces by the names that are called."""
        pieces = self.pieces
        acting = {name: block for name, block in named.items() if block not in pieces.idle}
        due = {name: block for name, block in acting.items() if block not in self.looked}
        for name in filter(due.__contains__, map(_BLOCK, calls)):
            self.blocks.append(due[name])
            if due[name] in pieces.looks:
                self.looked.add(due.pop(name))
            else:
                self.looked.clear()
                due.update(acting)
        return self
