"""The timetable of an order: when every element runs, given the times of its phases.

Used to find how many sends must be outstanding, to cost candidate orders, and to draw a schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from titan.compiler.schedules.order import Element, Order, Pair


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


@dataclass(frozen=True, slots=True)
class Timetable:
    """`starts[r][n]`, `ends[r][n]` of the n-th item of rank r."""

    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    work: tuple[float, ...]

    @property
    def makespan(self) -> float:
        return max(ends[-1] for ends in self.ends if ends)

    @property
    def flush_bubble(self) -> float:
        """Idle share of all ranks between the first start and the last end."""
        return 1.0 - sum(self.work) / (len(self.work) * self.makespan)

    def span_bubble(self, rank: int) -> float:
        """Idle share of one rank between its own first start and last end."""
        span = self.ends[rank][-1] - self.starts[rank][0]
        return 1.0 - self.work[rank] / span


def timetable(order: Order, durations: Durations) -> Timetable:
    """Earliest start of every item in the given order per rank. Raises StalledOrder when the order cannot complete."""
    ranks = len(order.ranks)
    done: dict[Element, tuple[float, int]] = {}
    position, clock = [0] * ranks, [0.0] * ranks
    starts: list[list[float]] = [[] for _ in range(ranks)]
    ends: list[list[float]] = [[] for _ in range(ranks)]
    waiting: dict[Element, list[int]] = {}
    runnable = list(range(ranks))
    while runnable:
        rank = runnable.pop()
        program = order.ranks[rank]
        while position[rank] < len(program):
            item = program[position[rank]]
            ready, missing = _ready(item, rank, order, done, durations.transfer)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            start = max(clock[rank], ready)
            clock[rank] = start + durations.of(item)
            starts[rank].append(start)
            ends[rank].append(clock[rank])
            position[rank] += 1
            for element in _parts(item):
                done[element] = (clock[rank], rank)
                runnable += waiting.pop(element, ())
    stuck = tuple((r, str(order.ranks[r][position[r]])) for r in range(ranks) if position[r] < len(order.ranks[r]))
    if stuck:
        raise StalledOrder(stuck)
    work = tuple(sum(durations.of(item) for item in program) for program in order.ranks)
    return Timetable(tuple(map(tuple, starts)), tuple(map(tuple, ends)), work)


def period(order: Order, durations: Durations, once: Timetable) -> float:
    """What a further step adds when ranks go on with the next one as soon as they have done their part of this, whose
    timetable is `once`."""
    if min(starts[0] + once.makespan - ends[-1] for starts, ends in zip(once.starts, once.ends, strict=True)) == 0:
        return once.makespan  # some rank begins first and ends last
    later = 1 + max(e.micro_batch for e in order.elements(0))

    def moved(item: Element | Pair) -> Element | Pair:
        if isinstance(item, Pair):
            return Pair(*(replace(half, micro_batch=half.micro_batch + later) for half in _parts(item)))
        return replace(item, micro_batch=item.micro_batch + later)

    twice = replace(order, ranks=tuple((*items, *map(moved, items)) for items in order.ranks))
    return timetable(twice, durations).makespan - once.makespan


def _parts(item: Element | Pair) -> tuple[Element, ...]:
    return (item.forward, item.backward) if isinstance(item, Pair) else (item,)


def _ready(
    item: Element | Pair, rank: int, order: Order, done: dict[Element, tuple[float, int]], transfer: float
) -> tuple[float, Element | None]:
    """Time at which an item's inputs are there, or the element that is missing."""
    ready = 0.0
    for element in _parts(item):
        for choices in needs(element, order):
            found = next((done[c] for c in choices if c in done), None)
            if found is None:
                return 0.0, _expected(choices, order)
            ready = max(ready, found[0] + (transfer if found[1] != rank else 0.0))
    return ready, None


def needs(element: Element, order: Order) -> Sequence[tuple[Element, ...]]:
    """What must be done before an element: for each need the elements that fulfil it (I or B of the next chunk)."""
    c, i = element.chunk, element.micro_batch
    if element.phase == "F":
        return () if order.first(c) else ((Element("F", c - 1, i),),)
    if element.phase == "W":
        return ((Element("I", c, i),),)
    own = (Element("F", c, i),)
    return (own,) if order.last(c) else (own, (Element("I", c + 1, i), Element("B", c + 1, i)))


def _expected(choices: tuple[Element, ...], order: Order) -> Element:
    """Of several alternatives the one that the order contains."""
    if len(choices) == 1:
        return choices[0]
    rank = order.placement[choices[0].chunk]
    return next((c for c in choices if c in order.contents[rank]), choices[0])


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
