"""An order with its elements numbered: what each waits for and what it is, so that timing it is adding numbers.

Numbers and waits are worked out once per order; orders are timed with many durations, and one step after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from operator import itemgetter
from typing import NamedTuple

from titan.compiler.schedules.order import Element, Order, Pair

NEVER = -1.0  # seconds at which what has not been done ends
NOTHING = -1  # the number of an element that is not there
Item = tuple[tuple[int, ...], int, int, int]  # numbers that it needs, its kind, its own number and a pair's other one


class _Kind(NamedTuple):
    """Elements of a phase and a chunk: how they are counted, the number of the one of micro-batch 0, which the others
    follow, their items by micro-batch, and for micro-batch 0 what their own rank must have done before."""

    number: int
    own: int
    items: list[Item]
    before: int


class Wiring:
    """`items[r]` are those of rank r; their kinds are the distinct (phase, chunk), or pairs of them, `kinds` has one
    item of each. What its own rank has done before is no need of an item. A backward to inputs is numbered as a whole
    one is: either will do for what comes after it."""

    def __init__(self, order: Order) -> None:
        self.order = order
        elements = chain.from_iterable(map(order.elements, range(len(order.ranks))))
        self.micro_batches = 1 + max(map(itemgetter(2), elements), default=0)
        self.elements = 3 * len(order.placement) * self.micro_batches  # from here on: what no element has to wait for
        self._of: dict[str, list[_Kind | None]] = {phase: [None] * len(order.placement) for phase in "FBIW"}
        self._chosen: dict[tuple[object, ...], tuple[int, Element | Pair]] = {}  # kinds' numbers, and one item of each
        done = [False] * self.elements + [True] * self.micro_batches
        if order.paired:
            self.items = tuple([self._paired(items, done) for items in order.ranks])
        else:
            self.items = tuple([self._program(order.elements(rank), done) for rank in range(len(order.ranks))])
        self.kinds = tuple(item for _, item in self._chosen.values())

    def _program(self, program: Iterable[Element], done: list[bool]) -> list[Item]:
        """The items of a rank without pairs. `done`: which elements have been listed, by number."""
        of, found = self._of, list[Item]()
        for phase, chunk, i in program:
            _, own, items, before = of[phase][chunk] or self._kind(phase, chunk)
            item = items[i]
            if not done[before + i]:  # it waits for ever: its own rank would have to do that later
                item = ((before + i,), *item[1:])
            done[own + i] = True
            found.append(item)
        return found

    def _paired(self, program: Iterable[Element | Pair], done: list[bool]) -> list[Item]:
        """The same where some are pairs, whose halves are done together."""
        found: list[Item] = []
        for item in program:
            halves = [(self._of[e.phase][e.chunk] or self._kind(e.phase, e.chunk), e.micro_batch) for e in parts(item)]
            needs = [need for kind, i in halves for need in kind.items[i][0]]
            needs += [kind.before + i for kind, i in halves if not done[kind.before + i]]
            numbers = [kind.own + i for kind, i in halves]
            for number in numbers:
                done[number] = True
            kinds = [kind.number for kind, _ in halves]
            kind = kinds[0] if len(kinds) == 1 else self._counted(tuple(kinds), item)
            found.append((tuple(needs), kind, numbers[0], NOTHING if len(numbers) == 1 else numbers[1]))
        return found

    def _kind(self, phase: str, chunk: int) -> _Kind:
        order, size = self.order, self.micro_batches
        needs = [("I", chunk)] if phase == "W" else [("F", chunk)] if phase in "BI" else []
        if phase == "F" and not order.first(chunk):
            needs.append(("F", chunk - 1))
        if phase in "BI" and not order.last(chunk):
            needs.append(("I", chunk + 1))
        before = self.elements
        waits: Iterable[tuple[int, ...]] = repeat(())
        for needed, where in needs:  # of several of its own rank the last needs the others
            first = self._first(needed, where)
            if order.placement[where] == order.placement[chunk]:
                before = first
            else:
                waits = zip(range(first, first + size))
        number, own = self._counted((phase, chunk), Element(phase, chunk, 0)), self._first(phase, chunk)
        items = list(zip(waits, repeat(number), range(own, own + size), repeat(NOTHING)))
        found = self._of[phase][chunk] = _Kind(number, own, items, before)
        return found

    def _counted(self, what: tuple[object, ...], item: Element | Pair) -> int:
        return self._chosen.setdefault(what, (len(self._chosen), item))[0]

    def _first(self, phase: str, chunk: int) -> int:
        """The number of the element of micro-batch 0."""
        return (3 * chunk + {"F": 0, "W": 2}.get(phase, 1)) * self.micro_batches

    def walk(
        self, lengths: Sequence[float], transfer: float, clocks: Sequence[float]
    ) -> tuple[list[float], list[float]]:
        """Earliest ends of all elements by number and of all ranks, which begin at their `clocks`; NEVER of what waits
        for ever. `lengths`: seconds of each kind, none below 0; `transfer`: between ranks."""
        ends, last = [NEVER] * self.elements, [NEVER] * len(self.items)

        def run(rank: int) -> Iterator[int]:
            """Goes on as far as what it needs is known; gives the element for which it waits."""
            clock = clocks[rank]
            for needs, kind, number, other in self.items[rank]:
                for need in needs:
                    while (end := ends[need]) == NEVER:
                        yield need
                    if end + transfer > clock:
                        clock = end + transfer
                clock += lengths[kind]
                ends[number] = clock
                if other != NOTHING:
                    ends[other] = clock
            last[rank] = clock

        ranks = [run(rank) for rank in range(len(self.items))]
        waiting: list[int] = []
        while (now := [next(rank, NOTHING) for rank in ranks]) != waiting:
            ranks.reverse()  # forwards come down the ranks, backwards up
            waiting = now[::-1]
        return ends, last


def parts(item: Element | Pair) -> tuple[Element, ...]:
    return (item.forward, item.backward) if isinstance(item, Pair) else (item,)
