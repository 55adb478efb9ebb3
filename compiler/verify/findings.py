"""What a proof says: whether it holds, how long it took, and every place where it does not."""

from __future__ import annotations

from collections.abc import Callable

from titan.compiler.plan.alike import Like, alone
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.program import Block, Plan, Role

MOST = 20  # findings that one proof reports; the first few say what is wrong


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    code         of the catalogue, T7xx
    message      the rule that is broken, in words
    role         pipeline coordinate of the program; -1 when the plan's header is at fault
    block        name of the block; "" when no single block is at fault
    index        of the instruction in its block; -1 when none
    instruction  its text
    call         position of the block call in the order; -1 when the block itself is wrong, whatever calls it
    """

    code: str
    message: str
    role: int = -1
    block: str = ""
    index: int = -1
    instruction: str = ""
    call: int = -1

    def __str__(self) -> str:
        place = f"role {self.role}" if self.role >= 0 else "plan"
        if self.block:
            place += f" block {self.block}"
        if self.call >= 0:
            place += f" call {self.call}"
        shown = f" {self.index}: {' '.join(self.instruction.split())}" if self.index >= 0 else ""
        return f"{self.code} {place}{shown}: {self.message}"


@dataclass(frozen=True, slots=True)
class Proof:
    """Outcome of one proof."""

    ok: bool
    seconds: float
    findings: tuple[Finding, ...]


def shown(instruction: Instruction) -> str:
    """Text of an instruction, also of one that cannot stand in a plan."""
    from titan.compiler.plan.text import instruction_text

    try:
        return instruction_text(instruction)
    except (KeyError, ValueError):
        return f"{instruction.opcode} {instruction.unit} {' '.join(instruction.writes)}"


def at(code: str, message: str, role: Role, block: Block, index: int, call: int = -1) -> Finding:
    """A finding at an instruction."""
    text = shown(block.instructions[index]) if 0 <= index < len(block.instructions) else ""
    return Finding(code, message, role.pipeline, block.name, index, text, call)


def found_alike(plan: Plan, prove: Callable[[tuple[Like, ...]], list[Finding]]) -> list[Finding]:
    """Findings of a proof to which roles that are alike are shown as such. It is to say of one nothing but what holds
    of all; where it finds something, each role is proven for itself, so that places are those where they stand."""
    return prove(plan.alike) and prove(alone(plan))


def used_blocks(role: Role, order: str) -> tuple[Block, ...]:
    """Blocks that an order calls, in the order of their first call."""
    names = dict.fromkeys(role.called(order))
    return tuple(role.block_table[name] for name in names)


def crosses_programs(plan: Plan, group: str) -> tuple[int, ...]:
    """Pipeline coordinates that a group joins; empty when its members run one program."""
    declared = plan.group_table.get(group)
    axes = declared.axes if declared else group
    if "pipeline" not in plan.mesh.resolve(axes):
        return ()
    if declared and declared.pipeline:
        return declared.pipeline if len(declared.pipeline) > 1 else ()
    size = plan.mesh.size("pipeline")
    return tuple(range(size)) if size > 1 else ()
