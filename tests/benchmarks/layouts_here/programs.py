"""A plan bound in the processes of a pool, whose steps can be timed."""

from __future__ import annotations

import statistics
import time

import torch
from titan.compiler.plan.program import Plan
from titan.runtime.data import SyntheticSource
from titan.runtime.drive import drive
from titan.runtime.interpreter import Executable
from titan.runtime.profile.pool import Member
from titan.runtime.state import allocate
from titan.runtime.transport.process_group import ProcessGroupTransport

from tests.runtime.alone import Storages

YARDSTICKS = 2  # ranks that measure the machine's speed
YARD = 384  # rows and columns of what they multiply
REPEATED = 200  # times


class Program:
    """A plan on one rank."""

    def __init__(self, member: Member, plan: Plan) -> None:
        transport = ProcessGroupTransport(plan, member.rank, member.store, member.device)
        source = SyntheticSource(int(plan.setting("model")["vocab"]), seed=1)
        with Storages() as self.storages:
            self.state = allocate(plan, member.rank, member.device)
            self.executable = Executable(plan, member.rank, transport, self.state, source)
        self.done = 0

    def step(self) -> float:
        start = time.perf_counter()
        drive(self.executable, self.done)
        self.done += 1
        return time.perf_counter() - start

    def peak(self) -> int:
        """Most bytes of tensors alive in a step, state included."""
        with self.storages:
            self.storages.peak = self.storages.live
            self.step()
        return self.storages.peak


def load(member: Member, plan: Plan, watched: bool) -> int:
    """Binds the plan and runs a step, and one more whose peak it gives where that is to be `watched`."""
    program = member.kept["program"] = Program(member, plan)
    program.step()
    return program.peak() if watched else 0


def steps(member: Member, times: int) -> list[float]:
    """Seconds of so many steps on this rank."""
    program: Program = member.kept["program"]
    member.meet()
    return [program.step() for _ in range(times)]


def yardstick(member: Member) -> float:
    """Seconds of a fixed product of matrices, on as many ranks at once as there are of the smallest layouts."""
    member.meet()
    if member.rank >= YARDSTICKS:
        return 0.0
    one, other = (torch.full((YARD, YARD), 0.5) for _ in range(2))
    times = []
    for _ in range(REPEATED):
        start = time.perf_counter()
        one @ other
        times.append(time.perf_counter() - start)
    return statistics.median(times)
