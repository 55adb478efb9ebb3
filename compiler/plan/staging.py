"""What a transport holds for a collective beside the plan's registers, from its issue to its wait and at the wait.

A value that is cut or joined along an inner dim is copied into parts. Beside that NCCL works in place; on CPU, over
gloo, a scatter is an exchange of parts that are then added, and a sum of little data gathers every member's.
"""

from __future__ import annotations

from math import prod

from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.operators import TensorType

SMALL = 1 << 19  # bytes, all members together, up to which gloo's sums gather everything and add it up in member order


@dataclass(frozen=True, slots=True)
class Staging:
    """Bytes beside the result's register: `held` from issue to wait, `landing` more during the wait."""

    held: int = 0
    landing: int = 0


NOTHING = Staging()


def staging(instruction: Instruction, operand: TensorType, result: int, members: int, host: bool) -> Staging:
    """`operand`: the type of what one member gives (of a buffer: flat), `result`: bytes of the register written, which
    counts from the issue; `host`: whether sums are made by gloo."""
    if members == 1:
        return NOTHING
    opcode, size = instruction.opcode, operand.bytes
    wide = 2 if operand.dtype in ("bf16", "f16") else 1  # sums of narrow values are formed in float32
    if opcode == "all_gather":
        return Staging(0, 0 if _outermost(operand, instruction.attribute("dim", 0)) else result)
    if opcode == "all_to_all":
        cut = 0 if _outermost(operand, instruction.attribute("split")) else size
        return Staging(cut, 0 if _outermost(operand, instruction.attribute("concat")) else result)
    if opcode == "reduce_scatter" or instruction.attribute("mode") == "reduce_scatter":
        cut = 0 if _outermost(operand, instruction.attribute("dim", 0)) else size
        shard = size // members
        if not host:
            return Staging(cut + shard - result)
        return Staging(cut + size - result, shard * wide + (shard if wide > 1 else 0))
    if opcode in ("all_reduce", "reduce_grad") and host:
        if size * members <= SMALL:
            return Staging(size * members - result, size * wide + (size if wide > 1 else 0))
        return Staging(size * wide - result if wide > 1 else 0, result if wide > 1 else 0)
    return NOTHING


def _outermost(kind: TensorType, dim: object) -> bool:
    """Whether slices along a dim lie one after the other in memory."""
    return prod(kind.shape[: int(str(dim))]) == 1
