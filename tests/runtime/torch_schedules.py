"""The schedules that the installed torch builds, without a process group: a stand-in stage has what they read."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.pipelining import schedules

LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
FOLDED = ("ZBVZeroBubble", "DualPipeV")


class StandIn:
    """What a schedule's constructor asks of a stage."""

    def __init__(self, index: int, rank: int, ranks: int, stages: int) -> None:
        self.stage_index, self.num_stages = index, stages
        self.group_rank, self.group_size, self.group = rank, ranks, None
        self.is_first, self.is_last, self.has_backward = index == 0, index == stages - 1, False
        self.submod, self.device = torch.nn.Identity(), torch.device("cpu")
        self.stage_index_to_group_rank: dict[int, int] | None = None


def table(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> str | None:
    """The table of actions as torch writes it; None where torch refuses the numbers."""
    number = 2 if name in FOLDED else chunks
    second = 2 * ranks - 1 if name in FOLDED else ranks
    stages: list[Any] = [StandIn(second * k, 0, ranks, ranks * number) for k in range(number)]
    kind = schedules.get_schedule_class(name)
    try:
        if issubclass(kind, schedules.PipelineScheduleSingle):
            order = kind(stages[0], micro_batches)._get_pipeline_order()
        else:
            order = kind(stages, micro_batches).pipeline_order
    except ValueError:
        return None
    return "".join(",".join("" if a is None else str(a) for a in order[rank]) + "\n" for rank in sorted(order))


def accepted(text: str, placement: tuple[int, ...]) -> int:
    """Steps of torch's own simulation, with its sends and receives; it raises on a deadlock. Pairs go as two actions,
    because that simulation knows none."""
    order: dict[int, list[Any]] = {}
    for rank, line in enumerate(text.splitlines()):
        actions = [schedules._Action.from_str(cell) for cell in line.split(",")]
        order[rank] = [part for a in actions if a is not None for part in (a.sub_actions or (a,))]
    lowered = schedules._add_send_recv(order, lambda stage: placement[stage], len(placement))
    simulated = schedules._simulate_comms_compute(lowered, lambda stage: placement[stage], len(placement))
    return max(len(steps) for steps in simulated.values())
