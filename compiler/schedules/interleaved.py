"""Interleaved 1F1B: every rank holds several chunks, dealt round-robin, so that the pipeline fills in smaller steps.

Micro-batches advance in groups of at least one per rank, as equal as can be: any count from one per rank on works.
"""

from __future__ import annotations

from titan.compiler.schedules.order import Element, Order, Schedule, Times, looped

CHUNKS, MOST_CHUNKS = 2, 64


def interleaved(ranks: int, micro_batches: int, chunks: int = CHUNKS) -> Order:
    """Each rank runs `chunks` chunks in turn, groups of micro-batches at a time (Narayanan et al. 2021)."""
    forwards = _sequence(ranks, micro_batches, range(chunks))
    backwards = _sequence(ranks, micro_batches, range(chunks - 1, -1, -1))
    programs = tuple(_rank(rank, ranks, chunks, forwards, backwards) for rank in range(ranks))
    return Order(looped(ranks, chunks), programs)


def _sequence(ranks: int, micro_batches: int, chunks: range) -> list[tuple[int, int]]:
    """(chunk of the rank, micro-batch) in order: a group of micro-batches through one chunk, then through the next."""
    groups = max(1, micro_batches // ranks)
    firsts = [-(-micro_batches * g // groups) for g in range(groups + 1)]
    return [(chunk, i) for g in range(groups) for chunk in chunks for i in range(firsts[g], firsts[g + 1])]


def _rank(
    rank: int, ranks: int, chunks: int, forwards: list[tuple[int, int]], backwards: list[tuple[int, int]]
) -> tuple[Element, ...]:
    total = len(forwards)
    group = next((n for n, (chunk, _) in enumerate(forwards) if chunk), total)
    warm_up = min(total, (chunks - 1) * group + 2 * (ranks - 1 - rank))
    program = [Element("F", rank + chunk * ranks, i) for chunk, i in forwards[:warm_up]]
    for n in range(total - warm_up):
        chunk, i = forwards[warm_up + n]
        program.append(Element("F", rank + chunk * ranks, i))
        chunk, i = backwards[n]
        program.append(Element("B", rank + chunk * ranks, i))
    program += [Element("B", rank + chunk * ranks, i) for chunk, i in backwards[total - warm_up :]]
    return tuple(program)


def _bubble(ranks: int, times: Times, chunks: int) -> float:
    return (ranks - 1) * (times.forward + times.backward) / chunks


def _frames(ranks: int, micro_batches: int, rank: int, chunks: int) -> float:
    """A warm-up of one group per chunk but the last, two more per rank below: D (1 + (D - 1) / (v D)) at most."""
    group = -(-micro_batches // max(1, micro_batches // ranks))
    return min(micro_batches, ((chunks - 1) * group + 2 * (ranks - 1 - rank) + 1) / chunks)


INTERLEAVED = Schedule(
    "interleaved",
    interleaved,
    _bubble,
    _frames,
    looped,
    "at least as many micro-batches as ranks",
    lambda ranks, micro_batches: micro_batches >= ranks,
    chunks=CHUNKS,
    most_chunks=MOST_CHUNKS,
)
