"""The timetable of an order: when every element runs, given the times of its phases.

Used to find how many sends must be outstanding, to cost candidate orders, and to draw a schedule.
"""

from __future__ import annotations

from titan.compiler.plan.frozen import dataclass
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
    wiring = order.wiring
    lengths = [durations.of(item) for item in wiring.kinds]
    starts, ends = wiring.walk(lengths, durations.transfer, [0.0] * len(order.ranks))
    stuck = tuple((r, str(order.ranks[r][len(done)])) for r, done in enumerate(ends) if len(done) < len(order.ranks[r]))
    if stuck:
        raise StalledOrder(stuck)
    work = tuple([sum([lengths[kind] for _, kind, _, _ in items]) for items in wiring.items])
    return Timetable(tuple(map(tuple, starts)), tuple(map(tuple, ends)), work)


def period(order: Order, durations: Durations, once: Timetable) -> float:
    """What a further step adds when ranks go on with the next one as soon as they have done their part of this, whose
    timetable is `once`."""
    if min(starts[0] + once.makespan - ends[-1] for starts, ends in zip(once.starts, once.ends, strict=True)) == 0:
        return once.makespan  # some rank begins first and ends last
    wiring = order.wiring
    lengths = [durations.of(item) for item in wiring.kinds]
    _, ends = wiring.walk(lengths, durations.transfer, [done[-1] for done in once.ends])
    return max(done[-1] for done in ends) - once.makespan


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
