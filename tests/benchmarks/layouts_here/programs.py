"""Plans of several layouts bound in the processes of one pool, so that their steps can be timed in turn."""

from __future__ import annotations

import time

from titan.compiler.plan.program import Plan
from titan.runtime.data import SyntheticSource
from titan.runtime.drive import drive
from titan.runtime.interpreter import Executable
from titan.runtime.profile.pool import Member
from titan.runtime.state import allocate
from titan.runtime.transport.process_group import ProcessGroupTransport

from tests.runtime.alone import Storages


class Program:
    """One plan on one rank."""

    def __init__(self, member: Member, plan: Plan, number: int) -> None:
        transport = ProcessGroupTransport(plan, member.rank, member.store, member.device, generation=number)
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


def load(member: Member, plan: Plan, number: int) -> int:
    """Binds a plan if this is one of its ranks and runs two steps; gives the peak of the second (0: not a rank)."""
    if member.rank >= plan.mesh.world_size:
        return 0
    program = member.kept[f"program/{number}"] = Program(member, plan, number)
    program.step()
    return program.peak()


def step(member: Member, number: int, times: int) -> list[float]:
    """Seconds of so many steps of one plan on this rank."""
    program: Program | None = member.kept.get(f"program/{number}")
    member.meet()
    return [program.step() for _ in range(times)] if program else []
