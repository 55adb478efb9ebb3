"""What handlers bind against: one rank's plan, state, transport and data, and what changes with the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.mesh import evaluate
from titan.compiler.plan.operators import Attribute
from titan.compiler.plan.program import Plan
from titan.compiler.plan.segment import parse_unit
from titan.runtime.data import Padded, TokenSource
from titan.runtime.documents import Documents
from titan.runtime.host import HostLink
from titan.runtime.place import Place
from titan.runtime.registers import ProgramError, Registers
from titan.runtime.segments import BoundSegment
from titan.runtime.state import State
from titan.runtime.transport.base import Channel, Communicator, Handle, Transport
from torch import Tensor

_COUNTED = {"train": 1, "update": 1, "undo": -1}  # optimizer steps that a run of an order adds

Action = Callable[[], Handle | None]


class Binding:
    """The world of one executable. Handlers call its methods while a program is loaded; actions read `slots`, `step`
    and `places`."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        transport: Transport,
        state: State,
        source: TokenSource,
        order: str,
        capture: Callable[[str, Tensor], None] | None,
        tiers: tuple[str, ...] = ("",),
        chained: bool = True,
    ) -> None:
        """`tiers` are those that the program leaves to the run; `chained` as of a bound segment."""
        self.plan, self.rank, self.transport, self.state = plan, rank, transport, state
        separator = plan.setting("train.separator")
        source = Padded(source, int(plan.setting("train.sequence"))) if plan.setting("train.padding") else source
        self.source = source if separator is None else Documents(source, int(separator))
        self.order, self.training = order, order in ("train", "body")
        self.capture, self._chained = capture, chained
        self.coordinates = plan.mesh.coordinates(rank)
        self.registers = Registers(plan, state.buffers, tiers)
        self.slots: list[Any] = self.registers.slots
        self.device = transport.device
        self.host = HostLink(self.device)
        self.step = 0
        self.skipped = False
        self._squares: Tensor | None = None
        self._norm: float | None = None
        self.places: list[Place] = []
        self.reports: dict[str, Tensor] = {}
        self.admit: Callable[[str, int], str] | None = None  # the tier of a frame at a position
        self._segments: dict[str, BoundSegment] = {}
        self._place_of: dict[int, int] = {}

    # --- while loading

    def segment(self, unit: str) -> BoundSegment:
        """The unit's segment bound to its layer: made once, shared by all its micro-batches and phases."""
        found = self._segments.get(unit)
        if found is None:
            name, layer = parse_unit(unit)
            found = self._segments[unit] = BoundSegment(
                self.plan.segment_table[name],
                layer,
                self.state.parameters,
                self.state.gradients,
                self.plan.mesh,
                self.coordinates,
                self._chained,
            )
        return found

    def place(self, instruction: Instruction) -> int:
        """Number of the place (seed, step, samples) of the micro-batch that the instruction works on."""
        for name in (*instruction.writes, *instruction.reads):
            _, mark, parameter = name.rstrip("?").partition(":")
            if mark:
                return self.place_number(int(parameter))
        raise ProgramError("no operand names a micro-batch")

    def place_number(self, micro_batch: int) -> int:
        return self._place_of.setdefault(micro_batch, len(self._place_of))

    def samples(self, micro_batch: int, step: int) -> tuple[int, ...]:
        """Sample indices in the data's order of this rank's rows of a micro-batch."""
        size = int(self.plan.setting("train.micro_batch"))
        share = micro_batch * self.plan.mesh.size("data") + self.plan.mesh.coordinate(self.coordinates, "data")
        first = step * int(self.plan.setting("train.global_batch")) + share * size
        return tuple(range(first, first + size))

    def communicator(self, instruction: Instruction) -> Communicator:
        members = self.plan.group_members(self.rank, instruction.group)
        return self.transport.communicator(members, instruction.stream)

    def channel(self, instruction: Instruction, sending: bool) -> Channel:
        peer = self.plan.mesh.peer(self.rank, instruction.group, int(instruction.attribute("peer")))
        sender, receiver = (self.rank, peer) if sending else (peer, self.rank)
        return self.transport.channel(sender, receiver, instruction.stream)

    def number(self, instruction: Instruction, name: str, default: Attribute = 0) -> int:
        """An attribute's value on this rank: a number or a coordinate expression."""
        return int(evaluate(instruction.attribute(name, default), self.plan.mesh, self.coordinates))

    # --- while running

    def begin(self, step: int) -> None:
        self.step, self.skipped, self._squares = step, False, None
        self.reports.clear()
        seed = int(self.plan.setting("train.seed", 0))
        self.places[:] = [Place(seed, step, self.samples(i, step), self.training) for i in self._place_of]

    def end(self) -> dict[str, float]:
        """Reported values of the step just run; counts the update."""
        found = {name: float(value) for name, value in self.reports.items()}
        if not self.skipped:
            self.state.updates += _COUNTED.get(self.order, 0)
        return found

    def finite(self, squares: Tensor) -> float | None:
        """Root of the squared norm; None, and the step counts as skipped, when it is not finite. All buckets ask for
        it: the device is waited for once."""
        if self._squares is not squares:
            self._squares, value = squares, float(squares)
            self._norm = math.sqrt(value) if 0 <= value < float("inf") else None
        self.skipped = self.skipped or self._norm is None
        return self._norm
