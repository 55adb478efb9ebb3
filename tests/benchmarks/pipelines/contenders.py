"""Who runs a step: torch.distributed.pipelining's schedules, Titan's, and the bound that waits for no one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from titan.compiler.lower import lower
from titan.compiler.plan.program import Block, Plan, Role
from titan.compiler.schedules.listing import Costs
from titan.compiler.schedules.solved import solve
from titan.compiler.schedules.timetable import Durations
from titan.compiler.strategy import Strategy
from titan.runtime.drive import drive
from titan.runtime.interpreter import Executable
from titan.runtime.segments import BoundSegment
from titan.runtime.state import allocate
from titan.runtime.transport.base import Channel, Communicator, Finished, Handle, Transport
from titan.runtime.transport.process_group import ProcessGroupTransport
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from tests.benchmarks.pipelines import model

RANKS = 2
ONE, TWO = (4, 4), (2, 2, 2, 2)  # layers of the stages with one and two chunks per rank
TORCH = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "LoopedBFS": 2,
    "InterleavedZeroBubble": 2,
    "InterleavedZeroBubble, 1 stage": 1,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
TITAN = ("gpipe", "one_f_one_b", "interleaved", "zero_bubble_h1", "zero_bubble_h2", "zero_bubble_v", "dualpipe_v")
FOLDED = ("ZBVZeroBubble", "DualPipeV")


class Fixed:
    """The same tokens every step, as torch's side has them."""

    def __init__(self, micro_batches: int) -> None:
        self.tokens, self.labels = model.batch(micro_batches)

    def load(self, indices: Sequence[int], start: int, stop: int) -> tuple[Tensor, Tensor]:
        rows = [index % len(self.tokens) for index in indices]
        return self.tokens[rows, start:stop], self.labels[rows, start:stop]


@dataclass(frozen=True)
class Contender:
    """`ours`: Titan; `step` runs a step on this rank; `peak` gives the bytes of tensors that it needs at most."""

    name: str
    ours: bool
    step: Callable[[], None]
    peak: Callable[[], int] = lambda: 0


def torch_contender(name: str, rank: int, micro_batches: int) -> Contender:
    chunks, kind = TORCH[name], name.partition(",")[0]
    layers = ONE if chunks == 1 else TWO
    held = [rank] if chunks == 1 else [rank, 3 - rank] if kind in FOLDED else [rank, rank + RANKS]
    modules = [model.stage(index, layers) for index in held]
    stages = [PipelineStage(m, i, len(layers), torch.device("cpu")) for m, i in zip(modules, held, strict=True)]
    made: Any = get_schedule_class(kind)
    single = issubclass(made, PipelineScheduleSingle)
    schedule = made(stages[0] if single else stages, micro_batches, loss_fn=model.loss)
    tokens, labels = model.batch(micro_batches)
    inputs = (tokens,) if 0 in held else ()
    target = {"target": labels} if len(layers) - 1 in held else {}
    parameters = [p for module in modules for p in module.parameters()]

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        schedule.step(*inputs, **target)

    return Contender(f"torch {name}", False, step)


def plan_of(strategy: Strategy, micro_batches: int) -> Plan:
    """The plan without norm and optimizer: torch's schedules have none either. Gradients are cleared where a rank first
    waits or goes backward."""
    plan = lower(model.spec(micro_batches), strategy)
    return replace(plan, roles=tuple(_without_update(role) for role in plan.roles))


def _without_update(role: Role) -> Role:
    clear = [i for b in role.blocks for i in b.instructions if i.opcode == "zero_grad" and i.updates[0][:2] == "g."]
    gone = {b.name for b in role.blocks if b.name.startswith(("norm", "step.", "stepped", "gathered."))}
    blocks = (*(b for b in role.blocks if b.name not in gone), Block("clear", (), tuple(clear)))
    calls = tuple(call for call in role.order("train") if call.block not in gone)
    waiting = {b.name for b in role.blocks if b.name[:1] in "FBIW" and any(i.opcode == "wait" for i in b.instructions)}
    first = next(n for n, call in enumerate(calls) if call.block in waiting or call.block[:2] in ("B.", "I."))
    train = (*calls[:first], calls[0]._replace(block="clear", arguments=()), *calls[first:])
    buffers = tuple(b for b in role.buffers if b.kind != "optimizer")
    return replace(role, buffers=buffers, blocks=blocks, orders=(("train", train),))


def strategy_of(name: str, micro_batches: int) -> Strategy:
    two = name in ("interleaved", "zero_bubble_v", "dualpipe_v", "v_half", "v_min", "solved")
    return Strategy(
        pipeline=RANKS, micro_batch=model.MICRO_BATCH, micro_batches=micro_batches, schedule=name,
        stages=TWO if two else ONE,
    )  # fmt: skip


def titan_contender(
    name: str, plan: Plan, rank: int, transport: Transport, micro_batches: int, ours: bool = True
) -> Contender:
    executable = Executable(plan, rank, transport, allocate(plan, rank), Fixed(micro_batches))
    done = [0]

    def step() -> None:
        drive(executable, done[0])
        done[0] += 1

    return Contender(name, ours, step, lambda: max(executable.curve))


def connected(plan: Plan, rank: int, name: str, store: Any, interface: str) -> Transport:
    return ProcessGroupTransport(plan, rank, dist.PrefixStore(f"titan {name}", store), interface=interface)


# --- the same compute with no one to wait for


class _Instant(Channel):
    """Sends vanish, receives are there at once with whatever the buffer holds."""

    __slots__ = ("_buffers",)

    def __init__(self) -> None:
        self._buffers: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}

    def send(self, value: Tensor) -> Handle:
        return Finished(None)

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype) -> Handle:
        key = (shape, dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.full(shape, 1e-3, dtype=dtype)
        return Finished(self._buffers[key].clone())


class _Alone(Communicator):
    """Every collective is done at once with the own value."""

    __slots__ = ()

    def _gather(self, value: Tensor, signature: Any, out: Tensor | None = None) -> Handle:
        return Finished(torch.stack([value] * self.size))

    def _exchange(self, parts: Tensor, signature: Any) -> Handle:
        return Finished(parts)

    def _sum_scatter(self, parts: Tensor, signature: Any) -> Handle:
        return Finished(parts[self.position])

    def _reduce(self, value: Tensor, signature: Any, in_place: bool) -> Handle:
        return Finished(value)

    def _broadcast(self, value: Tensor, root: int, signature: Any) -> Handle:
        return Finished(value.clone())


class Nobody(Transport):
    """No communication: what a rank computes, and nothing else."""

    __slots__ = ()

    def communicator(self, members: tuple[int, ...], stream: str) -> Communicator:
        return _Alone(members, self.rank)

    def channel(self, sender: int, receiver: int, stream: str) -> Channel:
        return _Instant()


def bound(rank: int, micro_batches: int) -> Contender:
    """Each rank's own forwards and backwards, both ranks at once, without communication and without bubble."""
    plan = plan_of(strategy_of("one_f_one_b", micro_batches), micro_batches)
    return titan_contender("bound", plan, rank, Nobody(rank, torch.device("cpu")), micro_batches, ours=False)


def torch_bound(rank: int, micro_batches: int) -> Contender:
    """The same with torch's modules and autograd."""
    module = model.stage(rank, ONE)
    tokens, labels = model.batch(micro_batches)
    shape = (model.MICRO_BATCH, model.SEQUENCE, model.HIDDEN)
    parameters = list(module.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        for x, y in zip(tokens.chunk(micro_batches), labels.chunk(micro_batches), strict=True):
            given = x if rank == 0 else torch.full(shape, 1e-3, requires_grad=True)
            out = module(given)
            if rank == RANKS - 1:
                (model.loss(out, y) / micro_batches).backward()
            else:
                out.backward(torch.full(shape, 1e-3))

    return Contender("torch bound", False, step)


# --- measured costs


def phases(rank: int, micro_batches: int) -> dict[int, tuple[float, float, float]]:
    """Seconds of F, I and W of this rank's chunks of the V, by the interpreter's own clock, without communication."""
    plan = plan_of(strategy_of("zero_bubble_v", micro_batches), micro_batches)
    marks: list[float] = []
    executable = Executable(
        plan, rank, Nobody(rank, torch.device("cpu")), allocate(plan, rank), Fixed(micro_batches),
        delay=lambda position: marks.append(time.perf_counter()),
    )  # fmt: skip
    opcodes = {"forward": 0, "backward_input": 1, "backward_weight": 2}
    chunk_of = {"F": 0, "I": 1, "W": 2}
    best: dict[int, list[float]] = {}
    for step in range(3):
        marks.clear()
        drive(executable, step)
        found: dict[int, list[float]] = {}
        program, ends = list(plan.role_of(rank).instructions()), [*marks[1:], time.perf_counter()]
        for (_, _, call, instruction), start, end in zip(program, marks, ends, strict=True):
            if instruction.opcode in opcodes and call.block[0] in chunk_of:
                chunk = int(call.block.partition(".c")[2].partition(".")[0])
                found.setdefault(chunk, [0.0, 0.0, 0.0])[opcodes[instruction.opcode]] += (end - start) / micro_batches
        for chunk, times in found.items():
            best[chunk] = [min(a, b) for a, b in zip(times, best.get(chunk, times), strict=True)]
    return {chunk: (t[0], t[1], t[2]) for chunk, t in best.items()}


def solved_plan(
    measured: dict[int, tuple[float, float, float]], transfer: float, chunks: int, frames: int, micro_batches: int
) -> Plan:
    """An order found for measured times, with so many chunks and at most so many frames of one on a rank."""
    number = RANKS * chunks
    joined = len(measured) // number  # measured chunks that are one here
    columns = [tuple(sum(measured[joined * c + n][k] for n in range(joined)) for c in range(number)) for k in range(3)]
    durations = Durations(columns[0], columns[1], columns[2], transfer)
    costs = Costs(durations, (1.0,) * number, (float(frames),) * RANKS)
    order = solve(RANKS, micro_batches, costs)
    strategy = strategy_of("solved", micro_batches)
    strategy = replace(strategy, written_order=order, stages=ONE if chunks == 1 else TWO)
    return plan_of(strategy, micro_batches)


def overhead(rank: int, micro_batches: int, repetitions: int) -> tuple[float, float]:
    """(microseconds per instruction, share of the step) that the interpreter spends outside segments, without waits."""
    inside = [0.0]
    kept = {name: getattr(BoundSegment, name) for name in ("run", "backward", "backward_input", "backward_weight")}

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            start = time.thread_time()
            found = method(*arguments, **named)
            inside[0] += time.thread_time() - start
            return found

        return call

    for name, method in kept.items():
        setattr(BoundSegment, name, timed(method))
    try:
        plan = plan_of(strategy_of("zero_bubble_v", micro_batches), micro_batches)
        run = titan_contender("overhead", plan, rank, Nobody(rank, torch.device("cpu")), micro_batches)
        run.step()
        number, shares = sum(1 for _ in plan.role_of(rank).instructions()), []
        for _ in range(repetitions):
            inside[0], start = 0.0, time.thread_time()
            run.step()
            whole = time.thread_time() - start
            shares.append(((whole - inside[0]) / number * 1e6, (whole - inside[0]) / whole))
    finally:
        for name, method in kept.items():
            setattr(BoundSegment, name, method)
    return sorted(shares)[len(shares) // 2]
