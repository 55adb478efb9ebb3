"""Times operators where they run: in the steps of small plans, with the caches as a step leaves them.

Every call of an operator's function is timed and filed under what it was given; the compiler knows the same shapes from
the plan. Instructions that are no operators are timed one by one, by the interpreter's own hook.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import pairwise
from typing import Any

import torch
from titan.compiler.plan.operators import OPERATORS
from titan.compiler.plan.program import Plan
from titan.runtime.data import SyntheticSource
from titan.runtime.drive import drive
from titan.runtime.interpreter import Executable
from titan.runtime.operator_table import functions
from titan.runtime.profile.pool import Member
from titan.runtime.state import allocate
from titan.runtime.transport.process_group import ProcessGroupTransport
from torch import Tensor

Shapes = tuple[tuple[int, ...], ...]
Key = tuple[str, str, Shapes]  # operator, phase, shapes of all that the function is given
BUSY = 2_000_000  # cycles, about a millisecond: longer than the host takes to ask for an operator's kernels
PHASES = ("forward", "backward", "backward_input", "backward_weight")


class Watch:
    """Seconds of every call of an operator's functions in this process, by key, while `on`."""

    def __init__(self, member: Member) -> None:
        self.on = False
        self.found: dict[Key, list[float]] = {}
        self._member = member
        for name, row in OPERATORS.items():
            if row.plan_only:
                continue
            module: Any = functions(name)
            for phase in PHASES:
                if hasattr(module, phase):
                    setattr(module, phase, self._timed(name, phase, getattr(module, phase)))

    def _timed(self, name: str, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        found, timed = self.found, _on_device if self._member.device.type == "cuda" else _here

        @wraps(function)
        def call(*arguments: Any) -> Any:
            if not self.on:
                return function(*arguments)
            key = (name, phase, _shapes(arguments[2:]))
            result, seconds = timed(function, arguments)
            found.setdefault(key, []).append(seconds)
            return result

        return call


def _here(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = function(*arguments)
    return result, time.perf_counter() - start


def _on_device(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, float]:
    """What the device takes for it, asked for while it is still busy: as in a step, where the host is ahead."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(BUSY)  # type: ignore[no-untyped-call]
    begin.record()
    result = function(*arguments)
    end.record()
    torch.cuda.synchronize()
    return result, begin.elapsed_time(end) * 1e-3


def _shapes(values: Sequence[Any]) -> Shapes:
    """Of operands as they are, of a backward's saved values and gradients; where gradients are added does not count."""
    given = values if isinstance(values[0], Tensor) else (*values[0].values(), *values[1])
    return tuple(tuple(t.shape) for t in given)


def watch(
    member: Member, plan: Plan, members: int, generation: int, warm_up: int, steps: int
) -> tuple[dict[Key, list[float]], list[list[float]]]:
    """Seconds of operators by key, and of every instruction in each of `steps` steps of a plan after its `warm_up`. A
    plan for one rank is run by the first `members`, each for itself and all at once; another by its ranks. Each
    `generation` differs.
    """
    if member.rank >= members:
        return {}, []
    timer: Watch = member.kept.get("watch") or Watch(member)
    member.kept["watch"] = timer
    timer.found.clear()
    rank = member.rank if plan.mesh.world_size > 1 else 0
    moments: list[float] = []
    transport = ProcessGroupTransport(plan, rank, member.store, member.device, generation=generation)
    source = SyntheticSource(int(plan.setting("model")["vocab"]), seed=1)
    state = allocate(plan, rank, member.device)
    clock = time.perf_counter

    def note(position: int) -> None:
        member.synchronize()
        moments.append(clock())

    executable = Executable(plan, rank, transport, state, source, delay=note)
    found = []
    for step in range(warm_up + steps):
        moments.clear()
        drive(executable, step)
        member.synchronize()
        found.append([b - a for a, b in pairwise((*moments, clock()))])
    one_by_one = Executable(plan, rank, transport, state, source, chained=False)
    timer.on = True
    for step in range(steps):
        drive(one_by_one, warm_up + steps + step)
    timer.on = False
    return {key: list(seconds) for key, seconds in timer.found.items()}, found[warm_up:]
