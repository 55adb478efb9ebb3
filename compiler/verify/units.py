"""What a compute instruction must read, write and update: the operands of its segment, in the order of its opcode."""

from __future__ import annotations

from dataclasses import dataclass

from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.program import Plan
from titan.compiler.plan.segment import Segment, bind, parse_unit


@dataclass(frozen=True, slots=True)
class Operands:
    """Formals of the registers that are written and read, in order; a gradient is `d.` and the formal's name; the
    frames are `f` and `wf`. After the registers come the buckets: parameters read, gradients updated."""

    writes: tuple[str, ...]
    reads: tuple[str, ...]
    parameters: tuple[str, ...]
    gradients: tuple[str, ...]


def buckets_of(plan: Plan, segment: Segment, layer: int | None, formals: tuple[str, ...]) -> tuple[str, ...]:
    table = plan.parameter_table
    return tuple(dict.fromkeys(table[bind(f, layer)].bucket for f in formals))


def _with_input(segment: Segment) -> tuple[str, ...]:
    """Parameters whose gradients come with those of the inputs."""
    found = {
        operand
        for call in segment.body
        if call.row.weight_with_input
        for name, operand in zip(call.row.operands, call.operands, strict=True)
        if name in call.row.parameters
    }
    return tuple(p for p in segment.parameters if p in found)


def gradient_inputs(segment: Segment) -> tuple[str, ...]:
    return tuple(v for v in segment.inputs if v in segment.differentiable)


def gradient_outputs(segment: Segment) -> tuple[str, ...]:
    return tuple(v for v in segment.outputs if v in segment.differentiable)


def expected(plan: Plan, instruction: Instruction) -> Operands:
    """Operands by the contract of the opcodes. Raises ValueError when `carry` names no differentiable input."""
    name, layer = parse_unit(instruction.unit)
    segment = plan.segment_table[name]
    held = buckets_of(plan, segment, layer, segment.parameters)
    parameters, gradients = tuple(f"p.{b}" for b in held), tuple(f"g.{b}" for b in held)
    frame = ("f",) if segment.frame else ()
    if instruction.opcode in ("forward", "recompute"):
        kept = frame if any(w.startswith("f.") for w in instruction.writes) or instruction.opcode == "recompute" else ()
        return Operands(segment.outputs + kept, segment.inputs, parameters, ())
    weights = ("wf",) if segment.weight_frame else ()
    if instruction.opcode == "backward_weight":
        rest = tuple(p for p in segment.parameters if p not in _with_input(segment))
        return Operands((), weights, (), tuple(f"g.{b}" for b in buckets_of(plan, segment, layer, rest)))
    carry = tuple(str(instruction.attribute("carry")).split(",")) if instruction.attribute("carry") else ()
    inputs = gradient_inputs(segment)
    if len(set(carry)) != len(carry) or not set(carry) <= set(inputs):
        raise ValueError(f"carry={','.join(carry)} must name differentiable inputs of the segment: {', '.join(inputs)}")
    given = tuple("d." + v for v in (*gradient_outputs(segment), *carry))
    reads = given + segment.kept_inputs + segment.kept_outputs + frame
    writes = tuple("d." + v for v in inputs)
    if instruction.opcode == "backward_input":
        held = buckets_of(plan, segment, layer, _with_input(segment))
        return Operands(writes + weights, reads, parameters, tuple(f"g.{b}" for b in held))
    return Operands(writes, reads, parameters, gradients)
