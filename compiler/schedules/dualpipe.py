"""DualPipe and DualPipeV: forwards and backwards of opposite directions are paired, so that each hides the other's
communication (DeepSeek-AI 2024). DualPipe runs two copies of the model through the ranks from both ends; DualPipeV
folds one copy of twice as many chunks into a V.

A rank does eight steps; direction 0 enters at the near end. `F`, `B`, `I`, `W` with the direction; `F0+B1` is an
overlapped pair.
"""

from __future__ import annotations

from collections.abc import Callable

from titan.compiler.schedules.order import Element, Order, Pair, Schedule, Times, both_ends, vee


def dualpipe(ranks: int, micro_batches: int) -> Order:
    """Two copies from both ends; even ranks and an even number of at least 2 * ranks micro-batches."""
    half, share = ranks // 2, micro_batches // 2
    programs = []
    for rank in range(ranks):
        near = min(rank, ranks - 1 - rank)
        swap = rank >= half

        def element(phase: str, direction: int, number: int, rank: int = rank, swap: bool = swap) -> Element:
            copy = direction ^ swap
            chunk = rank if copy == 0 else 2 * ranks - 1 - rank
            return Element(phase, chunk, copy * share + number)

        middle = near == half - 1
        programs.append(_Rank(element, half, near, share, share - ranks + near + 1, middle).program())
    return Order(both_ends(ranks), tuple(programs), copies=2)


def dualpipe_v(ranks: int, micro_batches: int) -> Order:
    """DualPipe folded: two chunks per rank in a V, at least 2 * ranks micro-batches."""
    programs = []
    for rank in range(ranks):

        def element(phase: str, direction: int, number: int, rank: int = rank) -> Element:
            return Element(phase, rank if direction == 0 else 2 * ranks - 1 - rank, number)

        main = micro_batches - 2 * ranks + rank + 1
        programs.append(_Rank(element, ranks, rank, micro_batches, main, rank == ranks - 1).program())
    return Order(vee(ranks), tuple(programs))


class _Rank:
    """Builds the eight steps; micro-batches of each phase and direction are numbered as they come."""

    def __init__(
        self, element: Callable[[str, int, int], Element], half: int, near: int, share: int, main: int, middle: bool
    ) -> None:
        self.element, self.half, self.near, self.share, self.main, self.middle = (
            element,
            half,
            near,
            share,
            main,
            middle,
        )
        self.count = {(phase, d): 0 for phase in "FIW" for d in (0, 1)}
        self.items: list[Element | Pair] = []
        self.deferred: list[Element] = []

    def take(self, phase: str, direction: int) -> Element:
        key = "I" if phase == "B" else phase
        number = self.count[key, direction]
        self.count[key, direction] = number + 1
        return self.element(phase, direction, number)

    def run(self, phase: str, direction: int) -> None:
        item = self.take(phase, direction)
        if phase == "I":
            self.deferred.append(self.element("W", direction, self.count["I", direction] - 1))
        self.items.append(item)

    def weight(self) -> None:
        self.items.append(self.deferred.pop(0))

    def pair(self, forward: int, backward: int, overlapped: bool = True) -> None:
        f, b = self.take("F", forward), self.take("B", backward)
        self.items += [Pair(f, b)] if overlapped else [f, b]

    def program(self) -> tuple[Element | Pair, ...]:
        far = self.half - self.near - 1
        for _ in range(2 * far):  # 1
            self.run("F", 0)
        for _ in range(self.near + 1):  # 2
            self.run("F", 0)
            self.run("F", 1)
        for _ in range(far):  # 3
            self.run("I", 1)
            self.weight()
            self.run("F", 1)
        for n in range(self.main):  # 4
            self.pair(0, 1, overlapped=n > 0 or not self.middle)
            self.pair(1, 0)
        for _ in range(far):  # 5
            self.run("B", 1)
            self.pair(1, 0)
        turn = (self.near + 1) // 2  # 6: from half-way on with deferred weight gradients
        for n in range(self.near + 1):
            self.run("I" if n > turn or (n == turn and self.near % 2 == 1) else "B", 1)
            self.run("I" if n >= turn else "B", 0)
        for _ in range(far):  # 7
            self.weight()
            self.run("I", 0)
        while self.deferred:  # 8
            self.weight()
        return tuple(self.items)


def _overlapped(times: Times) -> float:
    """F&B + B - 3 W, where an overlapped pair takes as long as its two halves."""
    return max(times.forward + 2 * times.backward - 3 * times.backward_weight, 0.0)


def _bubble(ranks: int, times: Times, chunks: int) -> float:
    return (ranks / 2 - 1) * _overlapped(times)


def _bubble_v(ranks: int, times: Times, chunks: int) -> float:
    return (ranks - 1) * max(times.forward, _overlapped(times) / 2)


def _frames(ranks: int, micro_batches: int, rank: int, chunks: int) -> float:
    return ranks + 1


def _frames_v(ranks: int, micro_batches: int, rank: int, chunks: int) -> float:
    return ranks + 0.5


DUALPIPE = Schedule(
    "dualpipe",
    dualpipe,
    _bubble,
    _frames,
    both_ends,
    "an even number of ranks and an even number of at least 2 * ranks micro-batches",
    lambda ranks, micro_batches: ranks % 2 == 0 and micro_batches % 2 == 0 and micro_batches >= 2 * ranks,
    copies=2,
    splits=True,
    pairs=True,
)
DUALPIPE_V = Schedule(
    "dualpipe_v",
    dualpipe_v,
    _bubble_v,
    _frames_v,
    vee,
    "at least 2 * ranks micro-batches",
    lambda ranks, micro_batches: micro_batches >= 2 * ranks,
    chunks=2,
    splits=True,
    pairs=True,
)
