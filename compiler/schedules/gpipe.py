"""GPipe: all forwards, then all backwards. Every micro-batch's activations live at once."""

from __future__ import annotations

from titan.compiler.schedules.order import Element, Order, Schedule, Times, straight


def gpipe(ranks: int, micro_batches: int) -> Order:
    """All forwards, then all backwards (Huang et al. 2019)."""
    program = tuple(
        (
            *(Element("F", rank, i) for i in range(micro_batches)),
            *(Element("B", rank, i) for i in range(micro_batches)),
        )
        for rank in range(ranks)
    )
    return Order(straight(ranks), program)


def _bubble(ranks: int, times: Times, chunks: int) -> float:
    return (ranks - 1) * (times.forward + times.backward)


def _frames(ranks: int, micro_batches: int, rank: int, chunks: int) -> float:
    return micro_batches


GPIPE = Schedule("gpipe", gpipe, _bubble, _frames, straight, fills=True)
