"""The schedules by name: adding one is one file and one row here."""

from __future__ import annotations

from titan.compiler.schedules import dualpipe, gpipe, interleaved, one_f_one_b, solved, v_memory, zb_v, zero_bubble
from titan.compiler.schedules.order import Schedule

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


def legal_counts(schedule: Schedule, ranks: int, micro_batches: int) -> tuple[int, ...]:
    """The nearest micro-batch counts below and above at which a schedule is defined."""
    below = next((m for m in range(micro_batches - 1, 0, -1) if schedule.legal(ranks, m)), None)
    above = next((m for m in range(micro_batches + 1, micro_batches + 4 * ranks + 2) if schedule.legal(ranks, m)), None)
    return tuple(m for m in (below, above) if m is not None)
