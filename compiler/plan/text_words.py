"""Tokens of the plan's text to values: numbers, names, attributes, tensor types, instructions."""

from __future__ import annotations

import json
import re
from math import prod

from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.opcodes import OPCODES
from titan.compiler.plan.operators import DTYPE_BYTES, Attribute, TensorType

LARGEST = 1 << 62
_NAME = re.compile(r"[A-Za-z_.][A-Za-z0-9_.*:+?'-]*\Z")
_TYPE = re.compile(r"([a-z]+[0-9]+)\[([0-9,]*)\]\Z")
_UNITS = frozenset(name for name, row in OPCODES.items() if row.unit)


class SyntaxProblem(Exception):
    """A sentence about the line at hand."""


def whole(text: str) -> int:
    """A decimal integer below 2^62 in size."""
    if len(text) > 20:
        raise SyntaxProblem(f"a number of {len(text)} digits; the largest is {LARGEST}")
    try:
        value = int(text)
    except ValueError:
        raise SyntaxProblem(f"`{text}` is not a whole number") from None
    if abs(value) > LARGEST:
        raise SyntaxProblem(f"{value} is too large; the largest is {LARGEST}")
    return value


def wholes(text: str) -> tuple[int, ...]:
    return tuple(map(whole, text.split(","))) if text else ()


def name(text: str) -> str:
    if not _NAME.match(text):
        raise SyntaxProblem(f"`{text[:60]}` is not a name")
    return text


def unword(text: str) -> str:
    if not text.startswith('"'):
        return text
    value = json.loads(text)
    if not isinstance(value, str):
        raise SyntaxProblem(f"`{text[:60]}` is not a string")
    return value


def attribute(text: str) -> Attribute:
    """Value of `key=value`: true, false, a number, else a string."""
    if text in ("true", "false"):
        return text == "true"
    if text[:1] in "0123456789-" or text in ("inf", "nan"):
        return whole(text) if text.lstrip("-").isdigit() else float(text)
    return unword(text)


def tensor_type(words: list[str]) -> TensorType:
    """`bf16[1,512,64] V1@tensor` as words."""
    matched = _TYPE.match(words[0])
    if not matched or matched[1] not in DTYPE_BYTES:
        raise SyntaxProblem(f"`{words[0][:60]}` is not a tensor type; dtypes are {', '.join(DTYPE_BYTES)}")
    shape = wholes(matched[2])
    if prod(shape) > LARGEST:
        raise SyntaxProblem(f"{words[0]} has too many elements")
    layout = []
    for piece in words[1:]:
        state, mark, factor = piece.partition("@")
        if not mark or not (state in ("R", "P", "M") or (state[:1] == "V" and state[1:].isdigit())):
            raise SyntaxProblem(f"`{piece[:60]}` is not a layout state; write R, P, M or V<dim>, `@`, the axis")
        layout.append((name(factor), state))
    return TensorType(matched[1], shape, tuple(layout))


def instruction(words: list[str]) -> Instruction:
    """An instruction's line as words, without its index."""
    opcode = words[0]
    if opcode not in OPCODES:
        raise SyntaxProblem(f"there is no opcode `{opcode[:60]}`")
    at = 1
    unit = group = stream = ""
    if opcode in _UNITS:
        unit, at = words[1], 2
    writes: list[str] = []
    reads: list[str] = []
    updates: list[str] = []
    attributes: list[tuple[str, Attribute]] = []
    target = writes
    for piece in words[at:]:
        first = piece[0]
        if first == "^":
            updates.append(piece[1:])
        elif first == "@":
            group = piece[1:]
        elif first == "!":
            stream = piece[1:]
        elif piece == "<-":
            target = reads
        elif "=" in piece:
            key, _, value = piece.partition("=")
            attributes.append((key, attribute(value)))
        else:
            target.append(piece)
    return Instruction(opcode, tuple(writes), tuple(reads), tuple(updates), unit, group, stream, tuple(attributes))
