"""The schedules by name: adding one is one file and one row here."""

from __future__ import annotations

from hashlib import sha256

from titan.compiler.schedules import dualpipe, gpipe, interleaved, one_f_one_b, solved, v_memory, zb_v, zero_bubble
from titan.compiler.schedules.order import Order, Schedule
from titan.compiler.schedules.written import written

SCHEDULES: dict[str, Schedule] = {
    row.name: row
    for row in (
        gpipe.GPIPE,
        one_f_one_b.ONE_F_ONE_B,
        interleaved.INTERLEAVED,
        zero_bubble.ZB_H1,
        zero_bubble.ZB_H2,
        zb_v.ZB_V,
        v_memory.V_HALF,
        v_memory.V_MIN,
        dualpipe.DUALPIPE,
        dualpipe.DUALPIPE_V,
        solved.SOLVED,
    )
}


_written: dict[str, Schedule] = {}  # by a name that says what is in it


def schedule_row(name: str) -> Schedule:
    """The row of a shipped schedule, or of an order that was read from a file in this process."""
    return SCHEDULES.get(name) or _written[name]


def add_written(stem: str, order: Order) -> str:
    """The name by which an order that was read from a file is known from now on: the file's, and a hash of the order.

    Raises ValueError when ranks hold different numbers of chunks."""
    name = f"{stem}@{sha256(repr(order).encode()).hexdigest()[:8]}"
    _written[name] = written(name, order)
    return name


def legal_counts(schedule: Schedule, ranks: int, micro_batches: int) -> tuple[int, ...]:
    """The nearest micro-batch counts below and above at which a schedule is defined."""
    if schedule.size is not None:
        return () if schedule.size[0] != ranks else schedule.size[1:]
    below = next((m for m in range(micro_batches - 1, 0, -1) if schedule.legal(ranks, m)), None)
    above = next((m for m in range(micro_batches + 1, micro_batches + 4 * ranks + 2) if schedule.legal(ranks, m)), None)
    return tuple(m for m in (below, above) if m is not None)
