"""An order with its elements numbered: what each item waits for and what it does, so that timing it is adding numbers.

Numbers and waits are worked out once per order; orders are timed with many durations, and one step after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from titan.compiler.schedules.order import Element, Order, Pair

NEVER = -1.0  # seconds at which what has not been done ends
NOWHERE = -1  # the number of an element that no rank does


class Item(NamedTuple):
    """`kind` numbers the distinct (phase, chunk), or pair of them; `needs` are (element, whether it comes from another
    rank); `does` the item's own elements."""

    kind: int
    needs: tuple[tuple[int, bool], ...]
    does: tuple[int, ...]


class Wiring:
    """`items[r]` are those of rank r; `kinds` one item of each kind; `elements` the number of elements."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.places = {e: rank for rank in range(len(order.ranks)) for e in order.elements(rank)}
        self.numbers = {e: n for n, e in enumerate(self.places)}
        self.elements = len(self.numbers)
        kinds: dict[tuple[tuple[str, int], ...], tuple[int, Element | Pair]] = {}
        self.items = tuple(
            tuple(self._item(item, rank, kinds) for item in program) for rank, program in enumerate(order.ranks)
        )
        self.kinds = tuple(item for _, item in kinds.values())

    def _item(
        self, item: Element | Pair, rank: int, kinds: dict[tuple[tuple[str, int], ...], tuple[int, Element | Pair]]
    ) -> Item:
        own = parts(item)
        kind, _ = kinds.setdefault(tuple((e.phase, e.chunk) for e in own), (len(kinds), item))
        waits = tuple(self._wait(choices, rank) for element in own for choices in needs(element, self.order))
        return Item(kind, waits, tuple(self.numbers[e] for e in own))

    def _wait(self, choices: tuple[Element, ...], rank: int) -> tuple[int, bool]:
        for choice in choices:
            if choice in self.numbers:
                return self.numbers[choice], self.places[choice] != rank
        return NOWHERE, False

    def walk(
        self, lengths: Sequence[float], transfer: float, clocks: Sequence[float]
    ) -> tuple[list[list[float]], list[list[float]]]:
        """Earliest starts and ends of every rank's items, in order, from the ranks' `clocks` on. A rank whose list
        is shorter than its program waits for ever. `lengths`: seconds of each kind; `transfer`: between ranks."""
        ends = [NEVER] * (self.elements + 1)  # the last is that of NOWHERE
        waiting: dict[int, list[int]] = {}
        started: list[list[float]] = [[] for _ in self.items]
        ended: list[list[float]] = [[] for _ in self.items]
        runnable = list(range(len(self.items)))
        while runnable:
            rank = runnable.pop()
            begun, done = started[rank], ended[rank]
            clock = done[-1] if done else clocks[rank]
            for kind, waits, does in self.items[rank][len(done) :]:
                for need, far in waits:
                    end = ends[need]
                    if end == NEVER:
                        waiting.setdefault(need, []).append(rank)
                        break
                    if far:
                        end += transfer
                    if end > clock:
                        clock = end
                else:
                    begun.append(clock)
                    clock += lengths[kind]
                    done.append(clock)
                    for element in does:
                        ends[element] = clock
                        if element in waiting:
                            runnable += waiting.pop(element)
                    continue
                break
        return started, ended


def parts(item: Element | Pair) -> tuple[Element, ...]:
    return (item.forward, item.backward) if isinstance(item, Pair) else (item,)


def needs(element: Element, order: Order) -> Sequence[tuple[Element, ...]]:
    """What must be done before an element: for each need the elements that fulfil it (I or B of the next chunk)."""
    c, i = element.chunk, element.micro_batch
    if element.phase == "F":
        return () if order.first(c) else ((Element("F", c - 1, i),),)
    if element.phase == "W":
        return ((Element("I", c, i),),)
    own = (Element("F", c, i),)
    return (own,) if order.last(c) else (own, (Element("I", c + 1, i), Element("B", c + 1, i)))
