"""An order with its elements numbered: what each waits for and what it is, so that timing it is adding numbers.

Numbers and waits are worked out once per order; orders are timed with many durations, and one step after another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from titan.compiler.schedules.order import Element, Order, Pair

NEVER = -1.0  # seconds at which what has not been done ends
NOTHING = -1  # the number of an element that is not there
Item = tuple[tuple[int, ...], int, int, int]  # numbers that it needs, its kind, its own number and a pair's other one


class _Kind(NamedTuple):
    """Of elements of a phase and a chunk: how they are counted, and what the one of micro-batch 0 has and needs for a
    number; those of other micro-batches follow."""

    number: int
    own: int
    needs: tuple[int, int]


class Wiring:
    """`items[r]` are those of rank r; their kinds are the distinct (phase, chunk), or pairs of them, `kinds` has one
    item of each. What its own rank has done before is no need of an item. A backward to inputs is numbered as a whole
    one is: either will do for what comes after it."""

    def __init__(self, order: Order) -> None:
        self.order = order
        ranks = range(len(order.ranks))
        self.micro_batches = 1 + max((e.micro_batch for rank in ranks for e in order.elements(rank)), default=0)
        self._none = 3 * len(order.placement) * self.micro_batches  # from here on: what no element has to wait for
        self._of: dict[tuple[str, int], _Kind] = {}
        self._chosen: dict[tuple[object, ...], tuple[int, Element | Pair]] = {}  # kinds' numbers, and one item of each
        self.items = tuple(map(self._program, order.ranks))
        self.kinds = tuple(item for _, item in self._chosen.values())

    def _program(self, program: Sequence[Element | Pair]) -> tuple[Item, ...]:
        """The items of a rank."""
        done = bytearray(self._none) + b"\1" * self.micro_batches
        found: list[Item] = []
        for item in program:
            if isinstance(item, Pair):
                found.append(self._pair(item, done))
                continue
            phase, chunk, i = item
            kind, own, (one, other) = self._of.get((phase, chunk)) or self._kind(item)
            one, other = one + i, other + i
            if done[one]:
                needs: tuple[int, ...] = () if done[other] else (other,)
            else:
                needs = (one,) if done[other] else (one, other)
            done[own + i] = 1
            found.append((needs, kind, own + i, NOTHING))
        return tuple(found)

    def _pair(self, pair: Pair, done: bytearray) -> Item:
        both = [(self._of.get(e[:2]) or self._kind(e), e.micro_batch) for e in (pair.forward, pair.backward)]
        needs = tuple(n + i for kind, i in both for n in kind.needs if not done[n + i])
        numbers = [kind.own + i for kind, i in both]
        for number in numbers:
            done[number] = 1
        return needs, self._counted((both[0][0].number, both[1][0].number), pair), numbers[0], numbers[1]

    def _counted(self, what: tuple[object, ...], item: Element | Pair) -> int:
        return self._chosen.setdefault(what, (len(self._chosen), item))[0]

    def _kind(self, element: Element) -> _Kind:
        phase, chunk, _ = element
        order, nothing = self.order, self._none
        if phase == "F":
            needs = nothing if order.first(chunk) else self._first("F", chunk - 1), nothing
        elif phase == "W":
            needs = self._first("I", chunk), nothing
        else:
            needs = self._first("F", chunk), nothing if order.last(chunk) else self._first("I", chunk + 1)
        number = self._counted((phase, chunk), element)
        found = self._of[phase, chunk] = _Kind(number, self._first(phase, chunk), needs)
        return found

    def _first(self, phase: str, chunk: int) -> int:
        """The number of the element of micro-batch 0."""
        return (3 * chunk + {"F": 0, "W": 2}.get(phase, 1)) * self.micro_batches

    def walk(
        self, lengths: Sequence[float], transfer: float, clocks: Sequence[float]
    ) -> tuple[list[list[float]], list[list[float]]]:
        """Earliest starts and ends of every rank's items, in order, from the ranks' `clocks` on. A rank whose list
        is shorter than its program waits for ever. `lengths`: seconds of each kind, none below 0; `transfer`: between
        ranks."""
        ends = [NEVER] * self._none
        started: list[list[float]] = [[] for _ in self.items]
        ended: list[list[float]] = [[] for _ in self.items]
        waiting: dict[int, list[Iterator[None]]] = {}
        runnable: list[Iterator[None]] = []

        def run(rank: int) -> Iterator[None]:
            begin, end, clock = started[rank].append, ended[rank].append, clocks[rank]
            for needs, kind, number, other in self.items[rank]:
                for need in needs:
                    while ends[need] == NEVER:
                        waiting.setdefault(need, []).append(ranks[rank])
                        yield
                    if ends[need] + transfer > clock:
                        clock = ends[need] + transfer
                begin(clock)
                clock += lengths[kind]
                end(clock)
                ends[number] = clock
                if number in waiting:
                    runnable.extend(waiting.pop(number))
                if other != NOTHING:
                    ends[other] = clock
                    runnable.extend(waiting.pop(other, ()))

        ranks = [run(rank) for rank in range(len(self.items))]
        runnable += ranks
        while runnable:
            next(runnable.pop(), None)
        return started, ended


def parts(item: Element | Pair) -> tuple[Element, ...]:
    return (item.forward, item.backward) if isinstance(item, Pair) else (item,)
