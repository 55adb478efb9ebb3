"""What pipeline ranks hold under a schedule: stages, ends of the model, and frames of layers on average."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from titan.compiler.schedules.order import Schedule
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


def frame_bytes(row: Schedule, rank: int, ranks: int, stored: float, whole: float) -> float:
    """Bytes that a frame of a layer holds on average. Between the two halves of a split backward it keeps the operands
    of weight gradients, about what is stored without recompute: on the last ranks for most of its life, on ranks of a
    V for half of it."""
    if not row.splits or ranks == 1:
        return stored
    share = rank / (ranks - 1) if row.chunks == 1 else 0.5
    return (1 - share) * stored + share * max(stored, whole)
