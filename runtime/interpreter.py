"""The interpreter: a rank's unrolled program as a list of bound actions, and the loop that runs them.

Everything is resolved before the first step: slots, segments, communicators, channels, sample positions. An action
returns None when it is done, or the handle that a wait must still see finished; it is called again then. The loop
decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.program import Plan
from titan.compiler.plan.text import instruction_text
from titan.runtime.data import TokenSource
from titan.runtime.handlers.binding import Action, Binding
from titan.runtime.handlers.table import HANDLERS
from titan.runtime.registers import ProgramError
from titan.runtime.state import State
from titan.runtime.transport.base import Handle, Transport
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step gave. `loss` and `grad_norm` are None on ranks whose program does not report them; `peak_bytes` is
    the most bytes of registers live at once, by the plan's sizes; `skipped`: the gradient was not finite, nothing was
    updated.
    """

    step: int
    loss: float | None
    grad_norm: float | None
    peak_bytes: int
    instructions: int
    skipped: bool
    values: dict[str, float] = field(default_factory=dict)


class Executable:
    """One rank's program, bound. `position` is the instruction under way, readable from other threads."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        transport: Transport,
        state: State,
        source: TokenSource,
        order: str = "train",
        *,
        check: bool = False,
        delay: Callable[[int], None] | None = None,
        capture: Callable[[str, Tensor], None] | None = None,
    ) -> None:
        """`check` compares every written register with its type in the plan; `delay` is called before each instruction;
        `capture` is given each bucket's name and reduced gradient just before its optimizer step."""
        self.rank, self.order, self.position = rank, order, 0
        self._delay = delay
        self._state = state
        self._binding = Binding(plan, rank, transport, state, source, order, capture)
        self._instructions: list[Instruction] = []
        self._actions: list[Action] = []
        for *_, instruction in plan.role_of(rank).instructions(order):
            self._append(instruction, check)
        self._binding.registers.finish()

    def _append(self, instruction: Instruction, check: bool) -> None:
        try:
            action = HANDLERS[instruction.opcode](self._binding, instruction)
        except ProgramError as error:
            where = f"rank {self.rank}, instruction {len(self._actions)} `{instruction_text(instruction)}`"
            raise ProgramError(f"{where}: {error.diagnostics[0].message}") from error
        self._binding.registers.mark()
        self._instructions.append(instruction)
        self._actions.append(_checked(action, self._binding, instruction) if check else action)

    def __len__(self) -> int:
        return len(self._actions)

    @property
    def curve(self) -> tuple[int, ...]:
        """Most bytes of registers live during each instruction."""
        return tuple(self._binding.registers.curve)

    def describe(self, position: int) -> str:
        """The text of an instruction."""
        if not 0 <= position < len(self._instructions):
            return "end of step"
        return instruction_text(self._instructions[position])

    def run(self, step: int) -> Generator[Handle, None, StepReport]:
        """One step. Yields the handle of a wait as long as that is not done; returns the report."""
        delay = self._delay
        self._binding.begin(step)
        for position, action in enumerate(self._actions):
            self.position = position
            if delay is not None:
                delay(position)
            while (handle := action()) is not None:
                yield handle
        self.position = len(self._actions)
        return self._report(step)

    def _report(self, step: int) -> StepReport:
        found = self._binding.end()
        norm = found.get("grad_norm")
        return StepReport(
            step=step,
            loss=found.get("loss"),
            grad_norm=None if norm is None else norm**0.5,
            peak_bytes=max(self._binding.registers.curve, default=0),
            instructions=len(self._actions),
            skipped=self._binding.skipped,
            values=found,
        )


def _checked(action: Action, binding: Binding, instruction: Instruction) -> Action:
    checks = [binding.registers.checker(name) for name in instruction.writes if not name.endswith("?")]

    def run() -> Handle | None:
        handle = action()
        if handle is None:
            for check in checks:
                check()
        return handle

    return run
