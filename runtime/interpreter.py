"""The interpreter: a rank's unrolled program as a list of bound actions, and the loop that runs them.

Everything is resolved before the first step: slots, segments, communicators, channels, sample positions. An action
returns None when it is done, or the handle that a wait must still see finished; it is called again then. The loop
decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.program import BEGUN, Plan
from titan.compiler.plan.segment import TIERS
from titan.compiler.plan.sizes import Sizes
from titan.compiler.plan.text import instruction_text
from titan.runtime.allocator import give_back_freed_memory, keeps_freed_memory
from titan.runtime.data import TokenSource
from titan.runtime.forecast import Forecast
from titan.runtime.handlers.binding import Action, Binding
from titan.runtime.handlers.table import HANDLERS
from titan.runtime.reading import out_of_memory, reading
from titan.runtime.registers import ProgramError
from titan.runtime.state import State
from titan.runtime.transport.base import Handle, Transport
from titan.runtime.watermark import Record, Watermark
from torch import Tensor

RETRIED = frozenset(
    ("compute", "collective", "transfer", "host", "memory", "data")
)  # kinds of opcodes that can be run again


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step gave. `loss` and `grad_norm` are None on ranks whose program does not report them; `peak_bytes` is
    the most bytes of registers live at once, by the plan's sizes (with workspace where tiers are left to the run), and
    `host_bytes` the most of their copies in host memory; `skipped`: the gradient was not finite, nothing was updated.
    """

    step: int
    loss: float | None
    grad_norm: float | None
    peak_bytes: int
    instructions: int
    skipped: bool
    values: dict[str, float] = field(default_factory=dict)
    host_bytes: int = 0


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
        watermark: Callable[[Executable], Watermark] | None = None,
        chained: bool = True,
    ) -> None:
        """`check` compares every written register with its type in the plan; `delay` is called before each instruction;
        `capture` is given each bucket's name and reduced gradient just before its optimizer step; `watermark` makes the
        policy of a program that leaves recompute tiers to the run, in place of the usual one; `chained`: operators that
        one kernel can do together are done so."""
        self.rank, self.ranks, self.order, self.position = rank, plan.mesh.world_size, order, 0
        self._delay = delay
        self._state = state
        program = list(plan.role_of(rank).instructions(order))
        instructions = [instruction for *_, instruction in program]
        self.begun = sum(call.block.endswith(BEGUN) for _, _, call, _ in program)  # instructions before a known norm
        self._settling = _ends_of_calls([call for call, *_ in program])  # of the first run; later there are none
        adaptive = any(i.opcode == "watermark" for i in instructions)
        tiers = TIERS if adaptive else ("",)
        self._binding = Binding(plan, rank, transport, state, source, order, capture, tiers, chained)
        self._instructions: list[Instruction] = []
        self._actions: list[Action] = []
        for instruction in instructions:
            self._append(instruction, check)
        self._binding.registers.finish()
        self.watermark = (watermark or usual)(self) if adaptive else None
        if self.watermark is not None:
            self._binding.admit = self.watermark.admit

    def _append(self, instruction: Instruction, check: bool) -> None:
        self._binding.registers.enter(instruction.when)
        try:
            action = HANDLERS[instruction.opcode](self._binding, instruction)
            if check:
                action = _checked(action, self._binding, instruction)
            if instruction.when:
                action = _conditional(action, self._binding, instruction)
        except ProgramError as error:
            where = f"rank {self.rank}, instruction {len(self._actions)} `{instruction_text(instruction)}`"
            raise ProgramError(f"{where}: {error.diagnostics[0].message}") from error
        self._binding.registers.mark()
        self._instructions.append(instruction)
        self._actions.append(action)

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
        delay, settling = self._delay, self._settling
        self._binding.begin(step)
        if self.watermark is not None:
            self.watermark.start(step)
        for position, action in enumerate(self._actions):
            self.position = position
            if delay is not None:
                delay(position)
            while True:
                try:
                    handle = action()
                except Exception as error:
                    if not self._relieved(error):
                        raise
                    continue
                if handle is None:
                    break
                yield handle
            if position in settling and keeps_freed_memory():
                give_back_freed_memory()
        self.position, self._settling = len(self._actions), frozenset()
        if self.watermark is not None:
            self.watermark.finish()
        return self._report(step)

    def _relieved(self, error: Exception) -> bool:
        """An allocation failed and stored frames could make room: the instruction, which has done nothing that it does
        not know of, is run again."""
        known = self._instructions[self.position].row.kind in RETRIED
        return known and self.watermark is not None and out_of_memory(error) and self.watermark.relieve(self.position)

    def _report(self, step: int) -> StepReport:
        found = self._binding.end()
        norm = found.get("grad_norm")
        return StepReport(
            step=step,
            loss=found.get("loss"),
            grad_norm=None if norm is None else norm**0.5,
            peak_bytes=self._peak(),
            instructions=len(self._actions),
            skipped=self._binding.skipped,
            values=found,
            host_bytes=self._binding.registers.on_host.most,
        )

    def _peak(self) -> int:
        if self.watermark is not None:
            return self.watermark.forecast.peak()
        return max(self._binding.registers.curve, default=0)


def _ends_of_calls(calls: list[int]) -> frozenset[int]:
    """Positions of the last instruction of each call; `calls` numbers the call of every instruction."""
    return frozenset(n for n, (call, then) in enumerate(zip(calls, [*calls[1:], -1], strict=True)) if call != then)


def usual(executable: Executable, record: Record | None = None, kind: type[Watermark] = Watermark) -> Watermark:
    """The policy of a program by the memory of its device."""
    binding, instructions = executable._binding, executable._instructions
    plan, registers = binding.plan, binding.registers
    frames = {i.writes[0]: str(i.attribute("begin")) for i in instructions if i.opcode == "watermark"}
    held = {b.name for b in plan.role_of(binding.rank).buffers if b.place == "device"}
    buffers = sum(t.nbytes for name, t in binding.state.buffers.items() if name in held)
    limit = int(plan.setting("memory.limit_bytes") or 1 << 62)

    def drop(frame: str, tier: str, names: tuple[str, ...]) -> None:
        registers.end(names)
        registers.slots[registers.slot(frame)] = tier

    forecast = Forecast(instructions, registers.lives, Sizes(plan))
    return kind(forecast, reading(limit, buffers, binding.device), frames, drop, record)


def _conditional(action: Action, binding: Binding, instruction: Instruction) -> Action:
    """The action in the tiers of its frame that run it, nothing in others."""
    slots, tier, when = binding.slots, binding.registers.slot(instruction.frame), instruction.when
    if not tier:
        raise ProgramError(f"{instruction.frame} is read before it is written")
    return lambda: action() if slots[tier] in when else None


def _checked(action: Action, binding: Binding, instruction: Instruction) -> Action:
    typed = (name for name in instruction.writes if not name.endswith("?") and not name.startswith("tier."))
    checks = [binding.registers.checker(name) for name in typed]

    def run() -> Handle | None:
        handle = action()
        if handle is None:
            for check in checks:
                check()
        return handle

    return run
