"""List scheduling: ranks in the order of time choose what to do next among what is ready and fits into memory.

Either along the forwards and backwards of a given order, which only weight gradients may leave, or by priority. An
element that another rank has started has a known end, so a rank can tell whether to fill the gap before it with a
weight gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import field
from heapq import heappop, heappush

from titan.compiler.plan.frozen import dataclass
from titan.compiler.schedules.order import Element, Order
from titan.compiler.schedules.timetable import Durations

Choose = Callable[["_Rank", list[Element]], Element]


@dataclass(frozen=True, slots=True)
class Costs:
    """What an order is found for: times per chunk, bytes (or any unit) that one micro-batch keeps per chunk from its
    forward to its weight gradient, and the most that each rank may keep at once; without `limits` any amount."""

    durations: Durations
    frames: tuple[float, ...]
    limits: tuple[float, ...] = ()

    @staticmethod
    def unit(chunks: int, ranks: int, limit: float | None = None) -> Costs:
        """F = I = W = 1 and one unit of memory for every chunk."""
        return Costs(Durations.unit(chunks), (1.0,) * chunks, () if limit is None else (limit,) * ranks)

    def fits(self, order: Order) -> bool:
        return not self.limits or all(u <= m for u, m in zip(usage(order, self.frames), self.limits, strict=True))


def usage(order: Order, frames: Sequence[float]) -> tuple[float, ...]:
    """Most that each rank keeps at once, from F to B or W."""
    found = []
    for rank in range(len(order.ranks)):
        kept = peak = 0.0
        for element in order.elements(rank):
            if element.phase == "F":
                kept += frames[element.chunk]
                peak = max(peak, kept)
            elif element.phase in "BW":
                kept -= frames[element.chunk]
        found.append(round(peak, 9))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Policy:
    """How a rank chooses. `patience`: an element known to arrive within this share of a weight gradient's time is
    waited for; `sequence` keeps forwards and backwards in these orders, else `forward_first` up to so many
    micro-batches in flight (0: backward first), and `deep_first` prefers chunks nearer to the loss."""

    patience: float = 0.0
    sequence: tuple[tuple[Element, ...], ...] = ()
    forward_first: tuple[int, ...] = ()
    deep_first: bool = True


@dataclass
class _Rank:
    number: int
    chunks: tuple[int, ...]
    limit: float
    program: list[Element] = field(default_factory=list)
    weights: deque[Element] = field(default_factory=deque)
    arrived: set[Element] = field(default_factory=set)
    coming: list[float] = field(default_factory=list)  # known arrivals
    next: dict[tuple[str, int], int] = field(default_factory=dict)
    kept: float = 0.0
    flying: int = 0
    free: float = 0.0
    position: int = 0


def list_order(placement: tuple[int, ...], micro_batches: int, costs: Costs, policy: Policy) -> Order | None:
    """The order that ranks choose; None when a limit leaves no way on. One copy of the model."""
    return _Scheduler(placement, micro_batches, costs, policy).run()


class _Scheduler:
    def __init__(self, placement: tuple[int, ...], micro_batches: int, costs: Costs, policy: Policy) -> None:
        self.placement, self.micro_batches, self.costs, self.policy = placement, micro_batches, costs, policy
        self.last = len(placement) - 1
        ranks = max(placement) + 1
        limits = costs.limits or (float("inf"),) * ranks
        self.ranks = [
            _Rank(r, tuple(c for c, held in enumerate(placement) if held == r), limits[r]) for r in range(ranks)
        ]
        for rank in self.ranks:
            rank.next = {(phase, c): 0 for phase in "FI" for c in rank.chunks}
        self.events: list[tuple[float, int, int, int, Element | None]] = []  # time, decision?, rank, serial number
        self.serial = 0
        self.reserve = self._reserves()

    def _reserves(self) -> dict[int, float]:
        """What must stay free after a chunk's forward, for the later chunks of its rank: then the oldest micro-batch
        can always go on."""
        return {c: sum(self.costs.frames[k] for k in rank.chunks if k > c) for rank in self.ranks for c in rank.chunks}

    def run(self) -> Order | None:
        for i in range(self.micro_batches):
            self.ranks[self.placement[0]].arrived.add(Element("F", 0, i))
        for rank in self.ranks:
            self._event(0.0, rank.number, None)
        while self.events:
            time, _, number, _, element = heappop(self.events)
            rank = self.ranks[number]
            if element is not None:
                rank.arrived.add(element)
                rank.coming.remove(time)
                self._event(time, number, None)
            elif time >= rank.free:
                self._decide(rank, time)
        total = 3 * self.micro_batches
        if any(len(rank.program) < total * len(rank.chunks) for rank in self.ranks):
            return None
        return Order(self.placement, tuple(tuple(rank.program) for rank in self.ranks))

    def _decide(self, rank: _Rank, time: float) -> None:
        ready = self._along(rank) if self.policy.sequence else self._ready(rank)
        if ready:
            self._start(rank, ready[0] if len(ready) == 1 else self._choose(rank, ready), time)
        elif rank.weights:
            weight = rank.weights[0]
            gap = self.policy.patience * self.costs.durations.of(weight)
            if not any(arrival < time + gap for arrival in rank.coming):
                self._start(rank, rank.weights.popleft(), time)

    def _along(self, rank: _Rank) -> list[Element]:
        """The next element of the given sequence, if it can run now."""
        sequence = self.policy.sequence[rank.number]
        if rank.position < len(sequence) and self._possible(rank, sequence[rank.position], 0.0):
            return [sequence[rank.position]]
        return []

    def _ready(self, rank: _Rank) -> list[Element]:
        found = []
        for phase in "IF":
            for c in rank.chunks:
                element = Element(phase, c, rank.next[phase, c])
                if self._possible(rank, element, self.reserve[c]):
                    found.append(element)
        return found

    def _possible(self, rank: _Rank, element: Element, reserve: float) -> bool:
        if element not in rank.arrived:
            return False
        if element.phase == "I":
            return True
        return rank.kept + self.costs.frames[element.chunk] + reserve <= rank.limit + 1e-9

    def _choose(self, rank: _Rank, ready: list[Element]) -> Element:
        ahead = self.policy.forward_first[rank.number] if self.policy.forward_first else 0
        first = "F" if rank.flying < ahead else "I"
        sign = -1 if self.policy.deep_first else 1
        return min(ready, key=lambda e: (e.phase != first, sign * e.chunk))

    def _start(self, rank: _Rank, element: Element, time: float) -> None:
        rank.program.append(element)
        end = rank.free = time + self.costs.durations.of(element)
        self._event(end, rank.number, None)
        chunk, i = element.chunk, element.micro_batch
        if element.phase == "W":
            rank.kept -= self.costs.frames[chunk]
            return
        rank.position += 1
        rank.arrived.discard(element)
        rank.next[element.phase, chunk] += 1
        if element.phase == "F":
            rank.kept += self.costs.frames[chunk]
            rank.flying += 1
            self._send(Element("I", chunk, i) if chunk == self.last else Element("F", chunk + 1, i), rank, end)
            return
        rank.flying -= 1
        rank.weights.append(Element("W", chunk, i))
        if chunk > 0:
            self._send(Element("I", chunk - 1, i), rank, end)

    def _send(self, element: Element, sender: _Rank, end: float) -> None:
        receiver = self.placement[element.chunk]
        arrival = end + (self.costs.durations.transfer if receiver != sender.number else 0.0)
        self.ranks[receiver].coming.append(arrival)
        self._event(arrival, receiver, element)

    def _event(self, time: float, rank: int, element: Element | None) -> None:
        """The arrival of what an element needs, or the moment at which a rank may choose; arrivals come first."""
        self.serial += 1
        heappush(self.events, (time, int(element is None), rank, self.serial, element))


def sequence_of(order: Order) -> tuple[tuple[Element, ...], ...]:
    """Forwards and backwards of every rank in order, backwards as I."""

    def plain(e: Element) -> Element:
        return e if e.phase == "F" else Element("I", e.chunk, e.micro_batch)

    ranks = range(len(order.ranks))
    return tuple(tuple(plain(e) for e in order.elements(r) if e.phase != "W") for r in ranks)


def pulled(order: Order, micro_batches: int) -> Order:
    """An order with everything as early as its memory allows (what its fullest rank keeps), in unit times: weight
    gradients fill the gaps."""
    chunks, ranks = len(order.placement), len(order.ranks)
    costs = Costs.unit(chunks, ranks, max(usage(order, (1.0,) * chunks)))
    found = list_order(order.placement, micro_batches, costs, Policy(sequence=sequence_of(order)))
    assert found is not None, "the order itself is a way through"
    return found
