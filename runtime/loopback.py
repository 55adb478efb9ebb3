"""The loopback driver: all ranks of a plan in one process, round-robin, with deadlocks seen and drawn."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch
from titan.compiler.plan.program import Plan
from titan.grammar.diagnostics import Diagnostic, Note, TitanError
from titan.runtime.assemble import Gradients, assemble, whole_bucket
from titan.runtime.data import TokenSource
from titan.runtime.interpreter import Executable, StepReport
from titan.runtime.state import State, allocate, role_buckets, views
from titan.runtime.transport.base import Handle
from titan.runtime.transport.loopback import Loopback
from titan.runtime.watermark import Watermark
from torch import Tensor

Run = Generator[Handle, None, StepReport]


class Deadlock(TitanError):
    """A full round in which no rank got further. `cycle` holds (rank, instruction text, ranks it waits for)."""

    def __init__(self, cycle: tuple[tuple[int, str, tuple[int, ...]], ...], blocked: int) -> None:
        self.cycle = cycle
        lines = tuple(Note(f"rank {rank}: `{text}` waits for {_ranks(others)}") for rank, text, others in cycle)
        message = f"deadlock: {blocked} ranks wait, none can go on; " + "; ".join(n.text for n in lines)
        super().__init__(Diagnostic("T612", message, notes=lines), exit_code=1)


@dataclass(frozen=True, slots=True)
class LoopbackResult:
    """`reports[step][rank]`; `gradients[step]` has whole, unpadded tensors by parameter name when they were kept."""

    states: tuple[State, ...]
    reports: tuple[tuple[StepReport, ...], ...]
    gradients: tuple[dict[str, Tensor], ...]

    @property
    def losses(self) -> tuple[float, ...]:
        """Loss of each step, as the first rank that reports one says."""
        return tuple(next(r.loss for r in ranks if r.loss is not None) for ranks in self.reports)

    @property
    def norms(self) -> tuple[float, ...]:
        """Gradient norm of each step, before clipping."""
        return tuple(next(r.grad_norm for r in ranks if r.grad_norm is not None) for ranks in self.reports)


def run_loopback(
    plan: Plan,
    steps: int,
    source: TokenSource,
    order: str = "train",
    states: tuple[State, ...] | None = None,
    *,
    first_step: int = 0,
    keep_gradients: bool = False,
    check: bool = False,
    delay: Callable[[int], None] | None = None,
    device: str = "cpu",
    turn: Callable[[list[int]], None] | None = None,
    watermark: Callable[[Executable], Watermark] | None = None,
) -> LoopbackResult:
    """Runs `steps` steps of a plan's order on all ranks.

    `states` go on from an earlier run (and are changed), else fresh ones are made. `keep_gradients` captures the summed
    gradients before clipping. `check` compares every register with the plan's types. `turn` may reorder the ranks
    before each round: a correct program gives the same bits in every order. Raises Deadlock, and TitanError T611 where
    members of a group disagree.
    """
    world, size = Loopback(device), plan.mesh.world_size
    ranks = states or tuple(allocate(plan, rank, torch.device(device)) for rank in range(size))
    kept = Gradients(plan) if keep_gradients else None
    executables = [
        Executable(
            plan,
            rank,
            world.transport(rank),
            ranks[rank],
            source,
            order,
            check=check,
            delay=delay,
            capture=kept.capture(rank) if kept else None,
            watermark=watermark,
        )
        for rank in range(size)
    ]
    reports, gradients = [], []
    for step in range(first_step, first_step + steps):
        reports.append(run_step(executables, step, turn))
        if kept:
            gradients.append(assemble(plan, kept.pieces()))
    left = world.unmatched()
    if left:
        raise TitanError([Diagnostic("T611", line) for line in left], exit_code=1)
    return LoopbackResult(ranks, tuple(reports), tuple(gradients))


def run_step(
    executables: list[Executable], step: int, turn: Callable[[list[int]], None] | None = None
) -> tuple[StepReport, ...]:
    """One step of all ranks, each run until it must wait. Raises Deadlock after a round without progress."""
    runs: dict[int, Run] = {e.rank: e.run(step) for e in executables}
    waits: dict[int, Handle] = {}
    reports: dict[int, StepReport] = {}
    while runs:
        moved, order = False, list(runs)
        if turn is not None:
            turn(order)
        for rank in order:
            if rank in waits and not waits[rank].done():
                continue
            moved = True
            try:
                waits[rank] = next(runs[rank])
            except StopIteration as end:
                reports[rank] = end.value
                del runs[rank]
                waits.pop(rank, None)
        if not moved:
            raise Deadlock(_cycle(executables, waits), len(runs))
    return tuple(reports[rank] for rank in sorted(reports))


def _cycle(executables: list[Executable], waits: dict[int, Handle]) -> tuple[tuple[int, str, tuple[int, ...]], ...]:
    """Follows each rank to the first that it waits for until one repeats; a chain that ends at a finished rank is given
    whole."""
    by_rank = {e.rank: e for e in executables}
    path: list[int] = []
    rank = min(waits)
    while rank in waits and rank not in path:
        path.append(rank)
        rank = next(iter(waits[rank].waiting_for()), -1)
    chosen = path[path.index(rank) :] if rank in path else path
    return tuple((r, by_rank[r].describe(by_rank[r].position), waits[r].waiting_for()) for r in chosen)


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def collect_parameters(states: tuple[State, ...], plan: Plan) -> dict[str, Tensor]:
    """Whole, unpadded parameters by name. Raises TitanError T613 where copies differ in any bit."""
    by_rank = {state.rank: state for state in states}
    return assemble(plan, [(state.rank, state.parameters | _gathered(plan, state, by_rank)) for state in states])


def _gathered(plan: Plan, state: State, by_rank: dict[int, State]) -> dict[str, Tensor]:
    """Parameters of which the rank holds a shard only, whole."""
    found: dict[str, Tensor] = {}
    for bucket in role_buckets(plan, plan.role_of(state.rank)):
        if "p" in bucket.sharded:
            name, members = f"p.{bucket.name}", plan.group_members(state.rank, bucket.shards)
            held = {rank: by_rank[rank].buffers[name] for rank in members}
            found |= views(plan, bucket, whole_bucket(plan, bucket, held, "p"))
    return found
