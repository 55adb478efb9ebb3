"""Live bytes over the calls of an order.

Registers are written once and freed once, and their sizes do not depend on the micro-batch. So a block moves the sum of
live bytes by a fixed amount and reaches a fixed height above where it began: the walk over an order adds one pair of
numbers per call, however long the blocks are.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from operator import add
from typing import TYPE_CHECKING

from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.rounds import repeats

if TYPE_CHECKING:
    from titan.compiler.plan.storages import Profile


@dataclass(frozen=True, slots=True)
class Liveness:
    """Live bytes of registers over an order.

    peak         largest sum of live registers and of the running instruction's workspace
    registers    live registers at that moment
    workspace    workspace of that instruction
    place        (call, index in its block) of that instruction; (-1, -1) when the order is empty
    curve        live bytes after each call of the order
    """

    peak: int
    registers: int
    workspace: int
    place: tuple[int, int]
    curve: tuple[int, ...]


class Calls:
    """Walks over the blocks that a role calls."""

    def __init__(self, profiles: Mapping[str, Profile]) -> None:
        self.profiles = profiles
        self.changes = {name: found.change for name, found in profiles.items()}
        self.tops = {name: found.height + found.workspace for name, found in profiles.items()}

    def walked(self, called: list[str]) -> Liveness:
        curve = list(accumulate(map(self.changes.__getitem__, called), initial=0))
        heights = list(map(add, curve, map(self.tops.__getitem__, called)))
        peak, after = max(heights, default=0), tuple(curve[1:])
        if peak <= 0:
            return Liveness(0, 0, 0, (-1, -1), after)
        position = heights.index(peak)
        found = self.profiles[called[position]]
        return Liveness(peak, peak - found.workspace, found.workspace, (position, found.index), after)

    def once(self, called: list[str]) -> list[str]:
        """Of rounds that leave as many bytes as they find one: the others reach what it reaches."""
        found = repeats(called)
        if found is None:
            return called
        after, end = found.begin + found.length, found.end - (found.end - found.begin) % found.length
        level = not sum(map(self.changes.__getitem__, called[found.begin : after]))
        return called[:after] + called[end:] if level else called
