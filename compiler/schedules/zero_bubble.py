"""Zero-bubble schedules with one chunk per rank: backward is split, and weight gradients fill what would be bubbles.

ZB-H1 keeps 1F1B's memory (D frames on every rank); ZB-H2 takes 2D - 1 and leaves no bubble within a rank's span when
F = I = W (Qi et al. 2023).
"""

from __future__ import annotations

from titan.compiler.schedules.order import ELEMENT, Element, Order, Schedule, Times, straight


def zb_h1(ranks: int, micro_batches: int) -> Order:
    """1F1B with split backward: rank r runs its weight gradients r micro-batches late."""
    return Order(straight(ranks), tuple(_rank(r, micro_batches, ranks - 1 - r, r) for r in range(ranks)))


def zb_h2(ranks: int, micro_batches: int) -> Order:
    """More forwards before the first backward, so that no rank waits in between."""
    return Order(straight(ranks), tuple(_rank(r, micro_batches, 2 * (ranks - 1 - r), 2 * r) for r in range(ranks)))


def _rank(rank: int, micro_batches: int, warm_up: int, late: int) -> tuple[Element, ...]:
    warm_up = min(warm_up, micro_batches)
    program = [ELEMENT(("F", rank, i)) for i in range(warm_up)]
    for i in range(micro_batches):
        if warm_up + i < micro_batches:
            program.append(ELEMENT(("F", rank, warm_up + i)))
        program.append(ELEMENT(("I", rank, i)))
        if i >= late:
            program.append(ELEMENT(("W", rank, i - late)))
    program += [ELEMENT(("W", rank, i)) for i in range(max(0, micro_batches - late), micro_batches)]
    return tuple(program)


def _bubble_h1(ranks: int, times: Times, chunks: int) -> float:
    f, i, w = times.forward, times.backward_input, times.backward_weight
    return (ranks - 1) * max(f, i, f + i - w)


def _bubble_h2(ranks: int, times: Times, chunks: int) -> float:
    """Ranks start one after the other; where I is long, that is what they wait for."""
    f, i, w = times.forward, times.backward_input, times.backward_weight
    return (ranks - 1) * max(f, f + i - 2 * w, i - f)


def _frames_h1(ranks: int, micro_batches: int, rank: int, chunks: int) -> float:
    return min(micro_batches, ranks)


def _frames_h2(ranks: int, micro_batches: int, rank: int, chunks: int) -> float:
    return min(micro_batches, 2 * ranks - 1)


ZB_H1 = Schedule("zero_bubble_h1", zb_h1, _bubble_h1, _frames_h1, straight, splits=True)
ZB_H2 = Schedule(
    "zero_bubble_h2",
    zb_h2,
    _bubble_h2,
    _frames_h2,
    straight,
    "at least 2 * ranks - 1 micro-batches",
    lambda ranks, micro_batches: micro_batches >= 2 * ranks - 1,
    splits=True,
)
