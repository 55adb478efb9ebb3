"""Activations of every schedule, counted while the interpreter runs, against the closed forms."""

from __future__ import annotations

import pytest
import torch
from titan.compiler.lower import lower
from titan.compiler.plan.instruction import Instruction, base_name
from titan.compiler.plan.program import Plan
from titan.compiler.schedules.registry import SCHEDULES
from titan.compiler.strategy import Strategy
from titan.runtime.data import SyntheticSource
from titan.runtime.interpreter import Executable
from titan.runtime.loopback import run_step
from titan.runtime.state import allocate
from titan.runtime.transport.loopback import Loopback

from tests.compiler.schedules.small import small_spec

Frame = tuple[str, str]  # layer, micro-batch


class Counter:
    """Frames of layers that are alive: from the forward that writes them to the last `free` of what backwards keep."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.program = [instruction for *_, instruction in plan.role_of(rank).instructions()]
        self.alive: dict[str, Frame] = {}
        self.peak = 0

    def __call__(self, position: int) -> None:
        """Called by the interpreter before each instruction: counts what the one before has left."""
        if position:
            self.count(self.program[position - 1])
        self.peak = max(self.peak, len(set(self.alive.values())))

    def count(self, instruction: Instruction) -> None:
        if instruction.opcode == "free":
            for name in instruction.reads:
                self.alive.pop(name, None)
        for name in instruction.writes:
            if name.startswith(("f.", "wf.")) and ".l" in name:
                self.alive[name] = (base_name(name).rpartition(".l")[2], name.rpartition(":")[2])


def counted(name: str, ranks: int, micro_batches: int) -> list[float]:
    """Most frames at once on every rank, in stages."""
    chunks = ranks * SCHEDULES[name].chunks
    spec = small_spec(layers=chunks, batch=micro_batches, devices=ranks)
    strategy = Strategy(pipeline=ranks, micro_batches=micro_batches, schedule=name, stages=(1,) * chunks)
    plan, world, counters = lower(spec, strategy), Loopback("cpu"), []
    executables = []
    for rank in range(ranks):
        counters.append(Counter(plan, rank))
        state = allocate(plan, rank, torch.device("cpu"))
        source = SyntheticSource(spec.model.vocab, seed=1)
        executables.append(Executable(plan, rank, world.transport(rank), state, source, delay=counters[-1]))
    run_step(executables, 0)
    assert not any(counter.alive for counter in counters)
    return [counter.peak / SCHEDULES[name].chunks for counter in counters]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", [n for n in SCHEDULES if n != "solved"])
def test_activations_are_the_closed_form(name: str, ranks: int) -> None:
    row, micro_batches = SCHEDULES[name], 2 * ranks
    forms = [row.frames(ranks, micro_batches, rank, row.chunks) for rank in range(ranks)]
    found = counted(name, ranks, micro_batches)
    if name.startswith(("v_", "dualpipe")):  # bounds: V-Half and V-Min by their rule, pairs where nothing is overlapped
        assert all(peak <= form for peak, form in zip(found, forms, strict=True)), found
        assert max(found) >= max(forms) - 1
        return
    assert found == forms
