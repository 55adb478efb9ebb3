"""The plan's text: what is stored, shown and read back, `parse_plan(print_plan(plan)) == plan`.

One instruction is one line, the same wherever it is shown:

    opcode [unit] writes <- reads ^updates @group !stream key=value        # right of `#` nothing is read

Everything is a token without blanks, so that reading is splitting. Strings that are not plain words are JSON with
blanks and `#` escaped. Numbers are those of Python: a point or an exponent makes a float.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.opcodes import OPCODES
from titan.compiler.plan.operators import Attribute, TensorType
from titan.compiler.plan.order_text import order_lines
from titan.compiler.plan.program import Block, Bucket, Buffer, Parameter, Plan, Role
from titan.compiler.plan.segment import Segment
from titan.compiler.plan.text_parse import VERSION, PlanFileError, parse_plan

__all__ = ["VERSION", "PlanFileError", "attribute_text", "instruction_text", "parse_plan", "print_plan", "word"]

_PLAIN = re.compile(r"[A-Za-z_@][A-Za-z0-9_.:@*+/-]*\Z")
_RESERVED = ("true", "false")
_OPCODE_TEXT = {name: name.ljust(15) + " " for name in OPCODES}


def word(text: str) -> str:
    """A string as one token: itself when plain, else JSON without blanks or `#`."""
    if _PLAIN.match(text) and text not in _RESERVED:
        return text
    quoted = json.dumps(text)
    return quoted.replace(" ", "\\u0020").replace("#", "\\u0023")


def attribute_text(value: Attribute) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return word(value) if isinstance(value, str) else repr(value)


def instruction_text(instruction: Instruction) -> str:
    """The line of an instruction.

    Raises ValueError when it names a unit although its opcode has none, or lacks one: that could not be read back.
    """
    row = OPCODES[instruction.opcode]
    if row.unit != bool(instruction.unit):
        raise ValueError(f"{instruction.opcode} with unit {instruction.unit!r}")
    parts = [_OPCODE_TEXT[instruction.opcode]]
    if instruction.unit:
        parts.append(instruction.unit.ljust(9) + " ")
    if instruction.writes:
        parts.append(" ".join(instruction.writes) + " ")
    if instruction.reads:
        parts.append("<- " + " ".join(instruction.reads) + " ")
    if instruction.updates:
        parts.append("^" + " ^".join(instruction.updates) + " ")
    if instruction.group:
        parts.append(f"@{instruction.group} ")
    if instruction.stream:
        parts.append(f"!{instruction.stream} ")
    for key, value in instruction.attributes:
        parts.append(f"{key}={attribute_text(value)} ")
    return "".join(parts).rstrip()


def type_text(tensor: TensorType) -> str:
    """`bf16[1,512,64] V1@tensor`."""
    shape = ",".join(map(str, tensor.shape))
    return " ".join((f"{tensor.dtype}[{shape}]", *(f"{state}@{factor}" for factor, state in tensor.layout)))


def numbers(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values))


def print_plan(plan: Plan, prices: Callable[[Instruction], str] | None = None) -> str:
    """Whole text. `prices` gives the remark after `#` of an instruction ("" for none); remarks are never read."""
    lines = [f"titan plan {plan.version}", ""]
    lines += [f"set {word(key)} {_one_line(text)}" for key, text in plan.settings]
    lines += ["", "mesh " + " ".join(f"{name}={size}" for name, size in plan.mesh.factors)]
    for group in plan.groups:
        restricted = f" pipeline={numbers(group.pipeline)}" if group.pipeline else ""
        lines.append(f"group {group.name} {group.axes}{restricted}")
    lines += ["", *(f"tensor {name} {type_text(tensor)}" for name, tensor in plan.tensors)]
    lines += ["", *map(_bucket_line, plan.buckets)]
    lines += ["", *map(_parameter_line, plan.parameters)]
    for segment in plan.segments:
        lines += ["", *_segment_lines(segment)]
    for role in plan.roles:
        lines += ["", *_role_lines(role, prices)]
    return "\n".join(lines) + "\n"


def _one_line(text: str) -> str:
    if "\n" in text or text != text.strip():
        raise ValueError("a setting must be JSON on one line")
    return text


def _bucket_line(bucket: Bucket) -> str:
    sums = f" sums={','.join(bucket.sums)}" if bucket.sums else ""
    replicas = f" replicas={bucket.replicas}" if bucket.replicas else ""
    sharded = f" shards={bucket.shards} sharded={','.join(bucket.sharded)}" if bucket.sharded else ""
    uncounted = f" uncounted={bucket.uncounted}" if bucket.uncounted else ""
    flat = f"{bucket.dtype}[{bucket.elements}]{sums}{replicas}"
    return f"bucket {bucket.name} {flat}{sharded}{uncounted} homes={numbers(bucket.homes)}"


def _parameter_line(parameter: Parameter) -> str:
    decay = " decay" if parameter.decay else ""
    return (
        f"parameter {parameter.name} [{numbers(parameter.shape)}] rows={parameter.rows} {type_text(parameter.tensor)} "
        f"bucket={parameter.bucket} +{parameter.offset}{decay} init={word(parameter.initializer)}"
    )


def _segment_lines(segment: Segment) -> list[str]:
    lines = [f"segment {segment.name}"]
    lines.append(" ".join(("  inputs", *segment.inputs)))
    lines.append(" ".join(("  parameters", *segment.parameters)))
    lines.append(" ".join(("  outputs", *segment.outputs)))
    if segment.finals:
        lines.append(" ".join(("  finals", *(name for pair in segment.finals for name in pair))))
    lines += [" ".join((f"  drop {tier}", *values)) for tier, values in segment.drops]
    lines += [" ".join((f"  rebuild {r.tier}", *r.writes, "<-", *r.reads)) for r in segment.rebuilds]
    lines += [f"  value {name} {type_text(tensor)}" for name, tensor in segment.values]
    for call in segment.body:
        attributes = "".join(f" {key}={attribute_text(value)}" for key, value in call.attributes)
        lines.append(f"  {' '.join(call.results)} = {call.operator} {' '.join(call.operands)}{attributes}")
    return lines


def _role_lines(role: Role, prices: Callable[[Instruction], str] | None) -> list[str]:
    chunks = ";".join(map(numbers, role.layers))
    lines = [f"role pipeline={role.pipeline} chunks={len(role.layers)} layers={chunks}"]
    lines += [_buffer_line(b) for b in role.buffers]
    for block in role.blocks:
        lines += _block_lines(block, prices)
    for name, calls in role.orders:
        lines += [f"order {name}", *order_lines(calls)]
    return lines


def _buffer_line(buffer: Buffer) -> str:
    place = "" if buffer.place == "device" else f" {buffer.place}"
    return f"buffer {buffer.name} {buffer.kind} {buffer.dtype}[{buffer.elements}]{place}"


def _block_lines(block: Block, prices: Callable[[Instruction], str] | None) -> list[str]:
    lines = [" ".join(("block", block.name, *block.parameters))]
    for index, instruction in enumerate(block.instructions):
        line = f"{index:4}  {instruction_text(instruction)}"
        remark = prices(instruction) if prices else ""
        lines.append(f"{line:<90} # {remark}" if remark else line)
    return lines
