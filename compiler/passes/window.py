"""How many sends of a channel may be outstanding: the fewest that cost no time.

A sender that waits for its oldest send before it may start the next ties itself to its neighbour's pace; in orders that
run ahead of their neighbour too few slots even deadlock. The number is found by running the order in unit times.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

from titan.compiler.passes.transfers import transfers
from titan.compiler.plan.program import BlockCall
from titan.compiler.schedules.order import Order
from titan.compiler.schedules.registry import schedule_row
from titan.compiler.schedules.timetable import Durations, timetable
from titan.compiler.strategy import Strategy

SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32)  # at least two: one slot would tie neighbours together at every jitter
SAMPLE = 8  # ranks at which the pattern of every schedule repeats; the proof of progress sees the real number


def sends_outstanding(strategy: Strategy) -> int:
    """The smallest window with which a steady run of the order takes no longer than with an unbounded one."""
    uneven = strategy.chunks > 1 and strategy.micro_batches % strategy.pipeline  # groups of unlike sizes: no pattern
    if strategy.written_order is not None or schedule_row(strategy.schedule).size or uneven:
        return _smallest(strategy.order, strategy.micro_batches)
    return _of_schedule(strategy.schedule, min(strategy.pipeline, SAMPLE), strategy.chunks)


@cache
def _of_schedule(schedule: str, ranks: int, chunks: int) -> int:
    return _smallest(schedule_row(schedule).order(ranks, 4 * ranks, chunks), 4 * ranks)


@lru_cache(maxsize=16)
def _smallest(order: Order, most: int) -> int:
    if len(order.ranks) == 1:
        return SIZES[0]
    unbounded = timetable(order, Durations.unit(len(order.placement))).makespan
    return next((size for size in SIZES if _makespan(order, size) == unbounded), most)


def _makespan(order: Order, window: int) -> float | None:
    """Unit-time run of the calls with rendezvous sends; None when it stalls."""
    programs = transfers(order, window)
    clocks, position = [0] * len(programs), [0] * len(programs)
    posted: dict[tuple[str, int], int] = {}  # receives, by block and micro-batch: time at which they were posted
    sent: dict[tuple[str, int], int] = {}  # sends, named as their receive
    progress = True
    while progress:
        progress = False
        for rank, calls in enumerate(programs):
            while position[rank] < len(calls):
                clock = _run(calls[position[rank]], clocks[rank], order, posted, sent)
                if clock is None:
                    break
                clocks[rank], progress = clock, True
                position[rank] += 1
    if any(position[rank] < len(calls) for rank, calls in enumerate(programs)):
        return None
    return max(clocks)


def _run(
    call: BlockCall, clock: int, order: Order, posted: dict[tuple[str, int], int], sent: dict[tuple[str, int], int]
) -> int | None:
    """Clock after a call, None if it cannot run yet."""
    word, halves, length = _read(call.block)
    if word == "recv":
        posted[call.block, call.arguments[0]] = clock
        return clock
    if word == "sent":
        arrived = posted.get((halves[0].onward, call.arguments[0]))
        return None if arrived is None else max(clock, arrived)
    for half, micro_batch in zip(halves, call.arguments, strict=True):
        key = (half.receive, micro_batch)
        if key in posted:  # a message from another rank
            if key not in sent:
                return None
            clock = max(clock, sent[key])
        elif not _local(half.kind, half.chunk, order):
            return None
    clock += length
    for half, micro_batch in zip(halves, call.arguments, strict=True):
        if half.onward:
            sent[half.onward, micro_batch] = clock
    return clock


class _Half(NamedTuple):
    """What a block does of a chunk: takes `x` in a forward, `d` in a backward, which its `receive` may bring, and sends
    the same to where `onward` receives it; `w`: neither, in a weight gradient."""

    kind: str
    chunk: int
    receive: str
    onward: str


@cache
def _read(block: str) -> tuple[str, tuple[_Half, ...], int]:
    """`recv`, `sent` or nothing, the halves that are computed, or that have sent, and how long that takes."""
    if block.startswith("recv."):
        return "recv", (), 0
    if block.startswith("sent."):
        _, kind, chunk = block.split(".")
        return "sent", (_half(kind, int(chunk[1:])),), 0
    halves = [name.split(".c") for name in block.split("+")]
    kinds = {"F": "x", "E": "x", "B": "d", "I": "d", "W": "w"}
    length = sum(2 if phase == "B" else 1 for phase, _ in halves)
    return "", tuple(_half(kinds[phase], int(chunk)) for phase, chunk in halves), length


def _half(kind: str, chunk: int) -> _Half:
    onward = f"recv.{kind}.c{chunk + (1 if kind == 'x' else -1)}" if kind in "xd" else ""
    return _Half(kind, chunk, f"recv.{kind}.c{chunk}", onward)


def _local(kind: str, chunk: int, order: Order) -> bool:
    """Whether a chunk's input comes from its own rank (or from data, or from its own I)."""
    if kind == "w":
        return True
    if kind == "x":
        return order.first(chunk) or order.placement[chunk - 1] == order.placement[chunk]
    return order.last(chunk) or order.placement[chunk + 1] == order.placement[chunk]
