"""What is special about some calls of an order: they open or close buckets, complete gradients, or issue something for
the element that follows."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cached_property

from titan.compiler.passes.overlap import NEXT, Early
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.listing import Renaming

NONE: frozenset[str] = frozenset()
Place = tuple[int, int]  # position of a call, number of the half
Ends = tuple[int, int]  # positions of a first and a last call


@dataclass(frozen=True)
class Marks:
    """What is special about one call: buckets read for the first or last time, gradients added to for the last time,
    and what it issues for the element that follows, whose name is `following`."""

    opens: frozenset[str] = NONE
    closes: frozenset[str] = NONE
    complete: frozenset[str] = NONE
    early: tuple[Early, ...] = ()
    following: str = ""

    @cached_property
    def word(self) -> str:
        """What it adds to the name of the block."""
        words = (".first" if self.opens else "", ".last" if self.closes or self.complete else "")
        return "".join(words) + (f".to_{self.following.replace('.c', '')}" if self.early else "")

    def renamed(self, renaming: Renaming) -> Marks:
        """The same of a role in other layers."""
        opens, closes, complete = (
            frozenset([renaming.name(f"p.{name}")[2:] for name in names]) if names else NONE
            for names in (self.opens, self.closes, self.complete)
        )
        early = tuple(Early(item.layers, renaming.instruction(item.issue)) for item in self.early)
        return Marks(opens, closes, complete, early, self.following)

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        """Parameters that stand for micro-batches of the element that follows."""
        names = {name.rstrip("?").partition(":")[2] for item in self.early for name in item.issue.writes}
        return tuple(symbol for symbol in NEXT if symbol in names)


def by_place(table: dict[str, Place]) -> dict[Place, frozenset[str]]:
    """Names by the place where each is."""
    found: dict[Place, list[str]] = {}
    for name, place in table.items():
        found.setdefault(place, []).append(name)
    return {place: frozenset(names) for place, names in found.items()}


def ends_of(names: list[str]) -> dict[str, Ends]:
    """First and last place of each name, by first place."""
    backwards, last = names[::-1], len(names) - 1
    return {name: (names.index(name), last - backwards.index(name)) for name in dict.fromkeys(names)}


def usual_places(names: list[str], ends: dict[str, Ends], special: Collection[int]) -> Iterator[int]:
    """Of each name its first place that is not special."""
    for name, (place, last) in ends.items():
        while place in special and place < last:
            place = names.index(name, place + 1)
        if place not in special:
            yield place
