"""ZB-V: two chunks per rank in a V, so that the loss of a micro-batch returns to the rank it came from.

1F1B's memory, and no bubble within a rank's span when F = I = W (Qi et al. 2024).
"""

from __future__ import annotations

from itertools import chain, islice, repeat, zip_longest

from titan.compiler.schedules.listing import pulled
from titan.compiler.schedules.order import ELEMENT, Element, Order, Schedule, Times, vee


def zb_v(ranks: int, micro_batches: int) -> Order:
    """Split backward on a V placement; with few micro-batches weight gradients are placed by what is idle."""
    order = Order(vee(ranks), tuple(_program(rank, ranks, micro_batches) for rank in range(ranks)))
    return order if micro_batches >= 2 * ranks - 1 else pulled(order, micro_batches)


def _program(rank: int, ranks: int, micro_batches: int) -> tuple[Element, ...]:
    """Patterns of phases of the two chunks, each so many times; what exceeds the micro-batches is left out."""
    down, up = rank, 2 * ranks - 1 - rank
    below = ranks - rank
    left = {
        phase + word: map(ELEMENT, zip(repeat(phase), repeat(chunk), range(micro_batches)))
        for word, chunk in (("d", down), ("u", up))
        for phase in "FIW"
    }
    patterns = (
        ("Fd", 2 * below - 1),
        ("Fu Fd", rank),
        ("Fu Iu Wu", below),
        ("Fd Id Wd Fu Iu Wu", max(micro_batches - ranks, 0)),
        ("Id Iu", rank),
        ("Id Wd", below),
        ("Iu Wu", micro_batches),
        ("Id Wd", micro_batches),
    )
    found: list[Element] = []
    for pattern, times in patterns:
        found += filter(
            None, chain.from_iterable(zip_longest(*(islice(left[name], times) for name in pattern.split())))
        )
    return tuple(found)


def _bubble(ranks: int, times: Times, chunks: int) -> float:
    """The last rank starts half a stage per rank later; unequal phases leave gaps within the spans too. Fitted on
    timetables: within 1.5 % of a step for phases up to 2.5 times as long as others."""
    f, i, w = times.forward, times.backward_input, times.backward_weight
    return (ranks - 1) * max(f / 2, w / 2, i - min(f, w), f - i / 2)


def _frames(ranks: int, micro_batches: int, rank: int, chunks: int) -> float:
    return min(micro_batches, ranks)


ZB_V = Schedule("zero_bubble_v", zb_v, _bubble, _frames, vee, chunks=2, splits=True)
