"""Orders that were written out, in a table, as schedules: a row each, for its own ranks and micro-batches."""

from __future__ import annotations

from titan.compiler.schedules.order import Element, Order, Schedule, Times
from titan.compiler.schedules.timetable import Durations, peak_frames, timetable


def written(name: str, order: Order) -> Schedule:
    """The row of an order. Raises ValueError when ranks hold different numbers of chunks."""
    ranks = len(order.ranks)
    held = [order.placement.count(rank) for rank in range(ranks)]
    if len(set(held)) > 1:
        raise ValueError(f"ranks hold {min(held)} to {max(held)} stages: every rank must hold as many")
    micro_batches = 1 + max(element.micro_batch for element in order.elements(0))
    chunks, peaks = held[0], peak_frames(order)

    def bubble(_ranks: int, times: Times, _chunks: int) -> float:
        phases = (times.forward, times.backward_input, times.backward_weight)
        forward, inputs, weights = ((phase / chunks,) * (ranks * chunks) for phase in phases)
        durations = Durations(forward, inputs, weights)
        return timetable(order, durations).makespan - micro_batches * sum(phases)

    return Schedule(
        name,
        lambda _ranks, _micro_batches: order,
        bubble,
        lambda _ranks, _micro_batches, rank, _chunks: peaks[rank],
        lambda _ranks, _chunks: order.placement,
        rule=f"pipeline = {ranks} and {micro_batches} micro-batches, as in its table",
        legal=lambda r, m: (r, m) == (ranks, micro_batches),
        chunks=chunks,
        splits=any(e.phase == "W" for items in order.ranks for e in items if isinstance(e, Element)),
        size=(ranks, micro_batches),
    )
