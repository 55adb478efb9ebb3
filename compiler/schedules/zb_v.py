"""ZB-V: two chunks per rank in a V, so that the loss of a micro-batch returns to the rank it came from.

1F1B's memory, and no bubble within a rank's span when F = I = W (Qi et al. 2024).
"""

from __future__ import annotations

from titan.compiler.schedules.listing import pulled
from titan.compiler.schedules.order import ELEMENT, Element, Order, Schedule, Times, vee


def zb_v(ranks: int, micro_batches: int) -> Order:
    """Split backward on a V placement; with few micro-batches weight gradients are placed by what is idle."""
    order = Order(vee(ranks), tuple(_Rank(rank, ranks, micro_batches).program() for rank in range(ranks)))
    return order if micro_batches >= 2 * ranks - 1 else pulled(order, micro_batches)


class _Rank:
    """Counts what each of the two chunks has done; what exceeds the micro-batches is left out."""

    def __init__(self, rank: int, ranks: int, micro_batches: int) -> None:
        self.rank, self.ranks, self.limit = rank, ranks, micro_batches
        self.chunks = (rank, 2 * ranks - 1 - rank)
        self.count = tuple(dict.fromkeys("FIW", 0) for _ in self.chunks)
        self.elements: list[Element] = []

    def run(self, phases: str, half: int) -> None:
        count, chunk = self.count[half], self.chunks[half]
        for phase in phases:
            done = count[phase]
            if done < self.limit:
                self.elements.append(ELEMENT((phase, chunk, done)))
                count[phase] = done + 1

    def program(self) -> tuple[Element, ...]:
        below = self.ranks - self.rank
        for _ in range(2 * below - 1):
            self.run("F", 0)
        for _ in range(self.rank):
            self.run("F", 1)
            self.run("F", 0)
        for _ in range(below):
            self.run("FIW", 1)
        down, up = self.count
        while up["F"] < down["F"] or down["F"] < self.limit:
            self.run("F", 0)
            self.run("IW", 0)
            self.run("FIW", 1)
        for _ in range(self.rank):
            self.run("I", 0)
            self.run("I", 1)
        for _ in range(below):
            self.run("IW", 0)
        while up["W"] < self.limit:
            self.run("IW", 1)
        while down["W"] < self.limit:
            self.run("IW", 0)
        return tuple(self.elements)


def _bubble(ranks: int, times: Times, chunks: int) -> float:
    """The last rank starts half a stage per rank later; unequal phases leave gaps within the spans too. Fitted on
    timetables: within 1.5 % of a step for phases up to 2.5 times as long as others."""
    f, i, w = times.forward, times.backward_input, times.backward_weight
    return (ranks - 1) * max(f / 2, w / 2, i - min(f, w), f - i / 2)


def _frames(ranks: int, micro_batches: int, rank: int, chunks: int) -> float:
    return min(micro_batches, ranks)


ZB_V = Schedule("zero_bubble_v", zb_v, _bubble, _frames, vee, chunks=2, splits=True)
