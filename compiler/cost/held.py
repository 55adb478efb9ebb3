"""What pipeline ranks hold under a schedule: stages, ends of the model, and frames of layers on average."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from titan.compiler.schedules.registry import schedule_row


class Held(NamedTuple):
    """What a pipeline rank holds: the stages of its chunks, and how many of these are a model's first or last."""

    stages: tuple[int, ...]
    firsts: int
    lasts: int


@lru_cache(maxsize=4096)
def held_by_rank(schedule: str, ranks: int, chunks: int) -> tuple[Held, ...]:
    """What every rank holds under a schedule."""
    row = schedule_row(schedule)
    placement = row.place(ranks, chunks)
    number = len(placement) // row.copies
    found = []
    for rank in range(ranks):
        stages = tuple(c % number for c, r in enumerate(placement) if r == rank)
        found.append(Held(stages, stages.count(0), stages.count(number - 1)))
    return tuple(found)


SAMPLE = 8  # ranks at which the pattern of every schedule repeats
Frames = tuple[float, float]  # in micro-batches of a rank's whole share: frames of forwards, and of split backwards


@lru_cache(maxsize=4096)
def frames_held(schedule: str, ranks: int, rank: int, micro_batches: int, chunks: int) -> tuple[Frames, ...]:
    """What a rank holds at once when that is most: frames between a forward and its backward, with frames between the
    two halves of a backward, which are larger where there is recompute. Several pairs of which none has less of both.

    Of a schedule that splits its order tells, of long pipelines a shorter one's."""
    row = schedule_row(schedule)
    most = row.frames(ranks, micro_batches, rank, chunks) / row.copies
    if not row.splits or ranks == 1:
        return ((most, 0.0),)
    if row.name == "solved":  # solved for one number of micro-batches: about as many of each as the ends of ZB-H1
        share = rank / (ranks - 1) if row.chunks == 1 else 0.5
        return ((most * (1 - share), most * share),)
    if row.size is not None or ranks <= SAMPLE:
        return _walked(schedule, ranks, _sampled(schedule, ranks, micro_batches), chunks)[rank]
    near = round(rank / (ranks - 1) * (SAMPLE - 1))
    fewer = _sampled(schedule, SAMPLE, max(SAMPLE * micro_batches // ranks, 1))
    shown = row.frames(SAMPLE, fewer, near, chunks) / row.copies
    found = []
    for f, w in _walked(schedule, SAMPLE, fewer, chunks)[near]:
        lacks = shown - (f + w)  # less than a frame is that of a chunk, in pipelines of any length
        share = (most - lacks) / (f + w) if lacks < 1 else most / shown
        found.append((f * share, w * share))
    return tuple(found)


def _sampled(schedule: str, ranks: int, micro_batches: int) -> int:
    """A legal number of micro-batches that shows what a rank holds at most."""
    row, most = schedule_row(schedule), min(micro_batches, 2 * ranks)
    if row.size is not None:
        return row.size[1]
    fewer = (m for m in range(most, 0, -1) if row.legal(ranks, m))
    return next(fewer, 0) or next(m for m in range(most, most + 4 * ranks + 2) if row.legal(ranks, m))


@lru_cache(maxsize=256)
def _walked(schedule: str, ranks: int, micro_batches: int, chunks: int) -> tuple[tuple[Frames, ...], ...]:
    """The pairs of every rank of an order."""
    order = schedule_row(schedule).order(ranks, micro_batches, chunks)
    found = []
    for rank in range(ranks):
        number = order.placement.count(rank)
        kept = split = 0
        pairs: set[tuple[int, int]] = set()
        for element in order.elements(rank):
            kept += {"F": 1, "B": -1, "I": -1}.get(element.phase, 0)
            split += {"I": 1, "W": -1}.get(element.phase, 0)
            pairs.add((kept, split))
        best = [p for p in pairs if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in pairs)]
        found.append(tuple((f / number, w / number) for f, w in sorted(best)))
    return tuple(found)
