"""V-Half and V-Min: V placement with a half and about a third of 1F1B's activations (Qi et al. 2024).

Each micro-batch repeats one block of six slots; where its two forwards and two input gradients lie in the block decides
how long frames live. Weight gradients take the holes, and everything is pulled as early as the same memory allows.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from titan.compiler.schedules.listing import pulled
from titan.compiler.schedules.order import Element, Order, Schedule, Times, vee

Offsets = Callable[[int, int], tuple[int, int, int, int]]  # (ranks, rank) -> slots of F0, F1, I1, I0
PERIOD = 6


def v_half(ranks: int, micro_batches: int) -> Order:
    """Half of 1F1B's activations."""

    def offsets(p: int, r: int) -> tuple[int, int, int, int]:
        shift = 3 if p % 2 == 0 else 0
        return 2 * r, 3 * p - 2 - r, 3 * p + shift + 2 * r - 1, 6 * p + shift - 2 - r

    return _order(ranks, micro_batches, offsets)


def v_min(ranks: int, micro_batches: int) -> Order:
    """About a third of 1F1B's activations; needs equal F, I and W to run without further bubbles."""

    def offsets(p: int, r: int) -> tuple[int, int, int, int]:
        shift = 2 if p % 3 == 0 else 0
        return r, 2 * p - 1 - r, 2 * p + shift + r, 4 * p + shift - 1 - r

    return _order(ranks, micro_batches, offsets)


def _order(ranks: int, micro_batches: int, offsets: Offsets) -> Order:
    pattern = Order(vee(ranks), tuple(_rank(r, ranks, micro_batches, offsets(ranks, r)) for r in range(ranks)))
    return pulled(pattern, micro_batches)


def _rank(rank: int, ranks: int, micro_batches: int, offsets: tuple[int, int, int, int]) -> tuple[Element, ...]:
    near, far = rank, 2 * ranks - 1 - rank
    kinds = (("F", near), ("F", far), ("I", far), ("I", near))
    slots: dict[int, Element] = {}
    for i in range(micro_batches):
        for (phase, chunk), offset in zip(kinds, offsets, strict=True):
            slots[PERIOD * i + offset] = Element(phase, chunk, i)
    program: list[Element] = []
    deferred: list[Element] = []
    for slot in range(max(slots) + 1):
        element = slots.get(slot)
        if element is None:
            if deferred:
                program.append(deferred.pop(0))
            continue
        program.append(element)
        if element.phase == "I":
            deferred.append(Element("W", element.chunk, element.micro_batch))
    return (*program, *deferred)


def _bubble_half(ranks: int, times: Times, chunks: int) -> float:
    return (ranks - 1) * (times.forward + times.backward) / 2


def _bubble_min(ranks: int, times: Times, chunks: int) -> float:
    return (ranks - 1) * (times.forward + times.backward) * 2 / 3


def _frames_half(ranks: int, micro_batches: int, rank: int, chunks: int) -> float:
    return min(micro_batches, (ranks + 2) / 2)


def _frames_min(ranks: int, micro_batches: int, rank: int, chunks: int) -> float:
    return min(micro_batches, ceil(2 * (ranks + 4) / 3) / 2)


def _steady_half(times: Times) -> float:
    """Between the forwards of a micro-batch lies one W, between its Is half an F: fitted on timetables within 5 %."""
    f, i, w = times.forward, times.backward_input, times.backward_weight
    return max(times.total, 2 * f + w, 2 * i + f / 2)


def _steady_min(times: Times) -> float:
    """Slots are as long as the longest of F and I: timetables have exactly this."""
    return max(times.total, 3 * times.forward, 3 * times.backward_input)


V_HALF = Schedule("v_half", v_half, _bubble_half, _frames_half, vee, chunks=2, splits=True, steady=_steady_half)
V_MIN = Schedule("v_min", v_min, _bubble_min, _frames_min, vee, chunks=2, splits=True, steady=_steady_min)
