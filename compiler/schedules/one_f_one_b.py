"""1F1B: a rank starts the backward of a micro-batch as soon as it can, so rank r holds at most D - r micro-batches."""

from __future__ import annotations

from titan.compiler.schedules.order import Element, Order, Schedule, Times, straight


def one_f_one_b(ranks: int, micro_batches: int) -> Order:
    """Warm-up forwards, then one forward and one backward in turn, then the remaining backwards (PipeDream-Flush)."""
    return Order(straight(ranks), tuple(_rank(rank, ranks, micro_batches) for rank in range(ranks)))


def _rank(rank: int, ranks: int, micro_batches: int) -> tuple[Element, ...]:
    warm_up = min(ranks - 1 - rank, micro_batches)
    program = [Element("F", rank, i) for i in range(warm_up)]
    for i in range(warm_up, micro_batches):
        program += [Element("F", rank, i), Element("B", rank, i - warm_up)]
    program += [Element("B", rank, i) for i in range(micro_batches - warm_up, micro_batches)]
    return tuple(program)


def _bubble(ranks: int, times: Times, chunks: int) -> float:
    return (ranks - 1) * (times.forward + times.backward)


def _frames(ranks: int, micro_batches: int, rank: int, chunks: int) -> float:
    return min(micro_batches, ranks - rank)


ONE_F_ONE_B = Schedule("one_f_one_b", one_f_one_b, _bubble, _frames, straight, fills=True)
