"""What a compute instruction must read, write and update: the operands of its segment, in the order of its opcode."""

from __future__ import annotations

from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.program import Plan
from titan.compiler.plan.segment import TIERS, Segment, bind, parse_unit


@dataclass(frozen=True, slots=True)
class Operands:
    """Formals of the registers that are written and read, in order; a gradient is `d.` and the formal's name; the
    pieces of frames are `f`, `fs`, `fn` and `wf`. After the registers come the buckets: parameters read, gradients
    updated."""

    writes: tuple[str, ...]
    reads: tuple[str, ...]
    parameters: tuple[str, ...]
    gradients: tuple[str, ...]


def buckets_of(plan: Plan, segment: Segment, layer: int | None, formals: tuple[str, ...]) -> tuple[str, ...]:
    table = plan.parameter_table
    return tuple(dict.fromkeys(table[bind(f, layer)].bucket for f in formals))


def buffer_name(plan: Plan, name: str) -> str:
    """The buffer that a bucket's operand stands for: `p.l0` for the buffer itself where it is whole, and for a register
    with the gathered bucket (`w.l0:i`, `r.w.l0:i`) where it is sharded; so for gradients. Else the name as it is."""
    kind = name.removeprefix("r.").partition(".")[0]
    if kind not in ("p", "g", "w", "dw"):
        return name
    bucket = plan.bucket_of(name)
    buffer = "p" if kind in ("p", "w") else "g"
    whole = kind in ("w", "dw")
    return f"{buffer}.{bucket.name}" if whole == (buffer in bucket.sharded) else f"{name} (a shard)"


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
    """Outputs that give a gradient, by the value whose gradient backward reads: of a partial result, the final one."""
    return tuple(segment.final(v) for v in segment.outputs if v in segment.differentiable)


def expected(plan: Plan, instruction: Instruction) -> Operands:
    """Operands by the contract of the opcodes. Raises ValueError when `carry` names no differentiable input."""
    name, layer = parse_unit(instruction.unit)
    segment = plan.segment_table[name]
    held = buckets_of(plan, segment, layer, segment.parameters)
    parameters, gradients = tuple(f"p.{b}" for b in held), tuple(f"g.{b}" for b in held)
    needed = tuple(f"p.{b}" for b in buckets_of(plan, segment, layer, segment.backward_parameters))
    frame = tuple(segment.pieces)
    if instruction.opcode == "forward":
        kept = tuple(w.partition(".")[0] for w in instruction.writes[len(segment.outputs) :])
        if kept not in ((), *(segment.stored(tier) for tier in TIERS)):
            kept = frame
        return Operands(segment.outputs + kept, segment.inputs, parameters, ())
    if instruction.opcode == "recompute":
        return _rebuilt(plan, segment, layer, str(instruction.attribute("tier")))
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
        return Operands(writes + weights, reads, needed, tuple(f"g.{b}" for b in held))
    return Operands(writes, reads, needed, gradients)


def _rebuilt(plan: Plan, segment: Segment, layer: int | None, tier: str) -> Operands:
    """Outputs and pieces of the frame that the tier does not store, from those that it does."""
    again = segment.rebuild(tier)
    if again is None:
        raise ValueError(f"tier {tier} rebuilds nothing of {segment.name}")
    stored = segment.stored(tier)
    used = {o for call in segment.rebuild_body(tier) for o in call.operands}
    held = buckets_of(plan, segment, layer, tuple(p for p in segment.parameters if p in used))
    missing = tuple(piece for piece in segment.pieces if piece not in stored)
    return Operands(again.writes + missing, again.reads + stored, tuple(f"p.{b}" for b in held), ())
