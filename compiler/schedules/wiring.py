"""An order with its items numbered: what each waits for and what it is, so that timing it is adding numbers.

Numbers and waits are worked out once per order; orders are timed with many durations, and one step after another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from titan.compiler.schedules.order import Element, Order, Pair

NEVER = -1.0  # seconds at which what has not been done ends
NOWHERE = -1  # the number of an element that no rank does
Item = tuple[tuple[int, ...], int, int]  # items of other ranks that it needs, its kind, its own number


class Wiring:
    """`items[r]` are those of rank r; their kinds are the distinct (phase, chunk), or pairs of them, `kinds` has one
    item of each. What its own rank has done before is no need of an item."""

    def __init__(self, order: Order) -> None:
        self.order = order
        firsts = tuple(accumulate(map(len, order.ranks), initial=0))
        self.numbers: dict[tuple[str, int, int], int] = {}
        for first, program in zip(firsts, order.ranks, strict=False):
            for number, item in enumerate(program, first):
                if isinstance(item, Pair):
                    self.numbers[item.forward] = self.numbers[item.backward] = number
                else:
                    self.numbers[item] = number
        self.chosen: dict[tuple[object, ...], tuple[int, Element | Pair]] = {}  # numbers of kinds, and one item of each
        self.items = tuple([self._program(items, first) for items, first in zip(order.ranks, firsts, strict=False)])
        self.kinds = tuple(item for _, item in self.chosen.values())

    def _program(self, program: Sequence[Element | Pair], first: int) -> tuple[Item, ...]:
        """The items of a rank, numbered from `first` on."""
        found: list[Item] = []
        for number, item in enumerate(program, first):
            if isinstance(item, Pair):
                kind = self._kind((item.forward[:2], item.backward[:2]), item)
                needs = (*self._needs(item.forward, first, number), *self._needs(item.backward, first, number))
            else:
                kind, needs = self._kind(item[:2], item), self._needs(item, first, number)
            found.append((needs, kind, number))
        return tuple(found)

    def _kind(self, what: tuple[object, ...], item: Element | Pair) -> int:
        found = self.chosen.get(what)
        if found is None:
            found = self.chosen[what] = len(self.chosen), item
        return found[0]

    def _needs(self, element: Element, first: int, number: int) -> tuple[int, ...]:
        """What must be done before an element, but for what stands before it on its rank: the numbers from `first` up
        to `number`. Of the next chunk I or B will do."""
        phase, chunk, i = element
        numbers, order = self.numbers, self.order
        if phase == "F" and order.first(chunk):
            return ()
        wanted = ("F", chunk - 1, i) if phase == "F" else ("I" if phase == "W" else "F", chunk, i)
        before = numbers.get(wanted, NOWHERE)
        needs = () if first <= before < number else (before,)
        if phase in "FW" or order.last(chunk):
            return needs
        after = numbers.get(("I", chunk + 1, i))
        if after is None:
            after = numbers.get(("B", chunk + 1, i), NOWHERE)
        return needs if first <= after < number else (*needs, after)

    def walk(
        self, lengths: Sequence[float], transfer: float, clocks: Sequence[float]
    ) -> tuple[list[list[float]], list[list[float]]]:
        """Earliest starts and ends of every rank's items, in order, from the ranks' `clocks` on. A rank whose list
        is shorter than its program waits for ever. `lengths`: seconds of each kind, none below 0; `transfer`: between
        ranks."""
        ends = [NEVER] * (sum(map(len, self.items)) + 1)  # the last is that of NOWHERE
        started: list[list[float]] = [[] for _ in self.items]
        ended: list[list[float]] = [[] for _ in self.items]
        waiting: dict[int, list[Iterator[None]]] = {}
        runnable: list[Iterator[None]] = []

        def run(rank: int) -> Iterator[None]:
            begun, done, clock = started[rank], ended[rank], clocks[rank]
            for needs, kind, number in self.items[rank]:
                for need in needs:
                    end = ends[need]
                    while end == NEVER:
                        waiting.setdefault(need, []).append(ranks[rank])
                        yield
                        end = ends[need]
                    if end + transfer > clock:
                        clock = end + transfer
                begun.append(clock)
                clock += lengths[kind]
                done.append(clock)
                ends[number] = clock
                if number in waiting:
                    runnable.extend(waiting.pop(number))

        ranks = [run(rank) for rank in range(len(self.items))]
        runnable += ranks
        while runnable:
            next(runnable.pop(), None)
        return started, ended


def parts(item: Element | Pair) -> tuple[Element, ...]:
    return (item.forward, item.backward) if isinstance(item, Pair) else (item,)
