"""Interleaved 1F1B: every rank holds several chunks, dealt round-robin, so that the pipeline fills in smaller steps.

Micro-batches advance in groups of one per rank; any count works, a last smaller group included.
"""

from __future__ import annotations

from titan.compiler.schedules.order import Element, Order, Schedule, looped
from titan.compiler.schedules.timetable import Durations, StalledOrder, timetable

CHUNKS = 2


def interleaved(ranks: int, micro_batches: int, chunks: int = CHUNKS) -> Order:
    """Each rank runs `chunks` chunks in turn, groups of micro-batches at a time (Narayanan et al. 2021)."""
    for extra in range(micro_batches * chunks):
        order = _order(ranks, micro_batches, chunks, extra)
        try:
            timetable(order, Durations.unit(ranks * chunks))
        except StalledOrder:
            continue  # a ragged last group may need some more forwards first
        return order
    raise AssertionError("all forwards first always completes")


def _order(ranks: int, micro_batches: int, chunks: int, extra: int) -> Order:
    forwards = _sequence(ranks, micro_batches, range(chunks))
    backwards = _sequence(ranks, micro_batches, range(chunks - 1, -1, -1))
    programs = tuple(_rank(rank, ranks, chunks, forwards, backwards, extra) for rank in range(ranks))
    return Order(looped(ranks, chunks), programs)


def _sequence(ranks: int, micro_batches: int, chunks: range) -> list[tuple[int, int]]:
    """(chunk of the rank, micro-batch) in order: a group of micro-batches through one chunk, then through the next."""
    return [
        (chunk, i)
        for first in range(0, micro_batches, ranks)
        for chunk in chunks
        for i in range(first, min(first + ranks, micro_batches))
    ]


def _rank(
    rank: int, ranks: int, chunks: int, forwards: list[tuple[int, int]], backwards: list[tuple[int, int]], extra: int
) -> tuple[Element, ...]:
    total = len(forwards)
    warm_up = (
        min(total, (chunks - 1) * ranks + 2 * (ranks - 1 - rank) + extra)
        if ranks > 1
        else min(total, chunks - 1 + extra)
    )
    program = [Element("F", rank + chunk * ranks, i) for chunk, i in forwards[:warm_up]]
    for n in range(total - warm_up):
        chunk, i = forwards[warm_up + n]
        program.append(Element("F", rank + chunk * ranks, i))
        chunk, i = backwards[n]
        program.append(Element("B", rank + chunk * ranks, i))
    program += [Element("B", rank + chunk * ranks, i) for chunk, i in backwards[total - warm_up :]]
    return tuple(program)


INTERLEAVED = Schedule("interleaved", interleaved, chunks=CHUNKS)
