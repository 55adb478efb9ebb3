"""The timetable of an order: when every element runs, given the times of its phases.

Used to find how many sends must be outstanding, to cost candidate orders, and to draw a schedule.
"""

from __future__ import annotations

from functools import cached_property

from titan.compiler.plan.frozen import dataclass
from titan.compiler.schedules.order import Element, Order, Pair
from titan.compiler.schedules.wiring import NEVER, Item, Wiring


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds (or units) of each phase per chunk and of a transfer; `pair` scales the sum of a pair's times."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    transfer: float = 0.0
    pair: float = 1.0

    @staticmethod
    def unit(chunks: int, size: float = 1.0) -> Durations:
        """F = I = W = `size` for every chunk."""
        same = (size,) * chunks
        return Durations(same, same, same)

    def of(self, item: Element | Pair) -> float:
        if isinstance(item, Pair):
            return self.pair * (self.of(item.forward) + self.of(item.backward))
        if item.phase == "F":
            return self.forward[item.chunk]
        if item.phase == "I":
            return self.backward_input[item.chunk]
        if item.phase == "W":
            return self.backward_weight[item.chunk]
        return self.backward_input[item.chunk] + self.backward_weight[item.chunk]


class StalledOrder(Exception):
    """An order that cannot run to its end: `waiting` holds the element at which each unfinished rank stands."""

    def __init__(self, waiting: tuple[tuple[int, str], ...]) -> None:
        self.waiting = waiting
        super().__init__("; ".join(f"rank {r} waits at {e}" for r, e in waiting))


@dataclass(frozen=True)
class Timetable:
    """When the items of an order run: `done` is the end of each element by its number, `last` of each rank. `lengths`
    are seconds of the kinds of its wiring, `transfer` those between ranks."""

    wiring: Wiring
    lengths: tuple[float, ...]
    transfer: float
    done: list[float]
    last: list[float]

    @cached_property
    def starts(self) -> tuple[tuple[float, ...], ...]:
        """`starts[r][n]` of the n-th item of rank r."""
        free = [(0.0, *ends[:-1]) for ends in self.ends]
        return tuple(tuple(map(self._start, *row)) for row in zip(self.wiring.items, free, strict=True))

    @cached_property
    def ends(self) -> tuple[tuple[float, ...], ...]:
        """`ends[r][n]` of the n-th item of rank r."""
        return tuple(tuple([self.done[number] for _, _, number, _ in items]) for items in self.wiring.items)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Seconds that each rank is busy."""
        return tuple(sum([self.lengths[kind] for _, kind, _, _ in items]) for items in self.wiring.items)

    @property
    def makespan(self) -> float:
        return max(self.last)

    @property
    def flush_bubble(self) -> float:
        """Idle share of all ranks between the first start and the last end."""
        return 1.0 - sum(self.work) / (len(self.work) * self.makespan)

    def span_bubble(self, rank: int) -> float:
        """Idle share of one rank between its own first start and last end."""
        return 1.0 - self.work[rank] / (self.last[rank] - self.starts[rank][0])

    def period(self) -> float:
        """What a further step adds when ranks go on with the next one as soon as they have done their part of this."""
        begun = [self._start(items[0], 0.0) for items in self.wiring.items]
        if min(start + self.makespan - end for start, end in zip(begun, self.last, strict=True)) == 0:
            return self.makespan  # some rank begins first and ends last
        _, last = self.wiring.walk(self.lengths, self.transfer, self.last)
        return max(last) - self.makespan

    def _start(self, item: Item, free: float) -> float:
        """Of an item whose rank is free from then on."""
        return max([free, *(self.done[need] + self.transfer for need in item[0])])


def timetable(order: Order, durations: Durations) -> Timetable:
    """Earliest start of every item in the given order per rank. Raises StalledOrder when the order cannot complete."""
    wiring = order.wiring
    lengths = tuple([durations.of(item) for item in wiring.kinds])
    done, last = wiring.walk(lengths, durations.transfer, [0.0] * len(order.ranks))
    if NEVER in last:
        stuck = [rank for rank, end in enumerate(last) if end == NEVER]
        places = [[done[number] for _, _, number, _ in wiring.items[rank]].index(NEVER) for rank in stuck]
        raise StalledOrder(tuple((r, str(order.ranks[r][n])) for r, n in zip(stuck, places, strict=True)))
    return Timetable(wiring, lengths, durations.transfer, done, last)


def peak_frames(order: Order) -> tuple[float, ...]:
    """Most frames alive per rank, from F to B or W, in stages (a chunk of a rank with v chunks counts 1/v)."""
    share = 1.0 / (order.chunks_per_copy / (max(order.placement) + 1))
    peaks = []
    for rank in range(len(order.ranks)):
        alive = peak = 0
        for element in order.elements(rank):
            if element.phase == "F":
                alive += 1
                peak = max(peak, alive)
            elif element.phase in "BW":
                alive -= 1
        peaks.append(peak * share)
    return tuple(peaks)
