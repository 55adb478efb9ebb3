"""Reading the plan's text: one pass over its lines, one function per kind of line. Nothing in it is ever executed."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod

from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.mesh import AXES, Group, Mesh
from titan.compiler.plan.operators import OPERATORS, TensorType
from titan.compiler.plan.order_text import read_calls
from titan.compiler.plan.program import Block, BlockCall, Bucket, Buffer, Parameter, Plan, Role
from titan.compiler.plan.segment import TIERS, Call, Rebuild, Segment
from titan.compiler.plan.text_words import (
    SyntaxProblem,
    attribute,
    instruction,
    name,
    tensor_type,
    unword,
    whole,
    wholes,
)

VERSION = 1


class PlanFileError(Exception):
    """A plan's text or file that cannot be used: code of the catalogue (T4xx), the sentence, the line (0: none)."""

    def __init__(self, code: str, message: str, line: int = 0) -> None:
        self.code, self.message, self.line = code, message, line
        super().__init__(f"{code}: line {line}: {message}" if line else f"{code}: {message}")


class _Reader:
    """State of the pass: what is complete, and the segment, role, block or order that is open."""

    def __init__(self) -> None:
        self.settings: list[tuple[str, str]] = []
        self.mesh: Mesh | None = None
        self.groups: list[Group] = []
        self.tensors: list[tuple[str, TensorType]] = []
        self.buckets: list[Bucket] = []
        self.parameters: list[Parameter] = []
        self.segments: list[Segment] = []
        self.roles: list[Role] = []
        self.segment: dict[str, tuple[str, ...]] = {}
        self.body: list[Call] = []
        self.drops: list[tuple[str, tuple[str, ...]]] = []
        self.rebuilds: list[Rebuild] = []
        self.values: list[tuple[str, TensorType]] = []
        self.head: tuple[int, tuple[tuple[int, ...], ...]] | None = None
        self.buffers: list[Buffer] = []
        self.blocks: list[Block] = []
        self.orders: list[tuple[str, tuple[BlockCall, ...]]] = []
        self.block: tuple[str, tuple[str, ...]] | None = None
        self.listing: list[Instruction] = []
        self.order: str = ""
        self.calls: list[BlockCall] = []

    def close_list(self) -> None:
        """Ends the open block or order."""
        if self.block:
            self.blocks.append(Block(*self.block, tuple(self.listing)))
        if self.order:
            self.orders.append((self.order, tuple(self.calls)))
        self.block, self.order, self.listing, self.calls = None, "", [], []

    def close(self) -> None:
        """Ends the open segment or role."""
        self.close_list()
        if self.segment:
            found = self.segment
            self.segments.append(
                Segment(
                    found["segment"][0],
                    found.get("inputs", ()),
                    found.get("parameters", ()),
                    found.get("outputs", ()),
                    tuple(self.body),
                    tuple(self.values),
                    tuple(zip(found.get("finals", ())[::2], found.get("finals", ())[1::2], strict=True)),
                    tuple(self.drops),
                    tuple(self.rebuilds),
                )
            )
        if self.head:
            self.roles.append(Role(*self.head, tuple(self.buffers), tuple(self.blocks), tuple(self.orders)))
        self.segment, self.body, self.values, self.drops, self.rebuilds = {}, [], [], [], []
        self.head, self.buffers, self.blocks, self.orders = None, [], [], []

    def plan(self, version: int) -> Plan:
        self.close()
        if self.mesh is None:
            raise SyntaxProblem("the plan has no mesh")
        return Plan(
            version,
            tuple(self.settings),
            self.mesh,
            tuple(self.groups),
            tuple(self.tensors),
            tuple(self.buckets),
            tuple(self.parameters),
            tuple(self.segments),
            tuple(self.roles),
        )


def _set(reader: _Reader, line: str) -> None:
    _, key, text = line.split(" ", 2)
    json.loads(text)
    reader.settings.append((unword(key), text))


def _mesh(reader: _Reader, words: list[str]) -> None:
    factors = []
    for piece in words[1:]:
        factor, _, size = piece.partition("=")
        factors.append((name(factor), whole(size)))
        if factor.split(".")[0] not in AXES or factors[-1][1] < 1:
            raise SyntaxProblem(f"`{piece}` is not an axis with its size; axes are {', '.join(AXES)}")
    if "pipeline" not in dict(factors) or prod(size for _, size in factors) > 1 << 24:
        raise SyntaxProblem("a mesh has an axis `pipeline` and at most 2^24 ranks")
    reader.mesh = Mesh(tuple(factors))


def _group(reader: _Reader, words: list[str]) -> None:
    restricted = wholes(words[3].removeprefix("pipeline=")) if len(words) > 3 else ()
    reader.groups.append(Group(name(words[1]), words[2], restricted))


def _tensor(reader: _Reader, words: list[str]) -> None:
    reader.tensors.append((name(words[1]), tensor_type(words[2:])))


def _bucket(reader: _Reader, words: list[str]) -> None:
    flat = tensor_type([words[2]])
    named = dict(piece.partition("=")[::2] for piece in words[3:])
    sums = tuple(named["sums"].split(",")) if "sums" in named else ()
    reader.buckets.append(
        Bucket(
            name(words[1]),
            flat.elements,
            flat.dtype,
            sums,
            named.get("replicas", ""),
            named.get("shards", ""),
            tuple(named["sharded"].split(",")) if "sharded" in named else (),
            named.get("uncounted", ""),
            wholes(named["homes"]),
        )
    )


def _parameter(reader: _Reader, words: list[str]) -> None:
    bucket = next(n for n, piece in enumerate(words) if piece.startswith("bucket="))
    reader.parameters.append(
        Parameter(
            name(words[1]),
            wholes(words[2].strip("[]")),
            whole(words[3].removeprefix("rows=")),
            tensor_type(words[4:bucket]),
            words[bucket].removeprefix("bucket="),
            whole(words[bucket + 1].removeprefix("+")),
            "decay" in words[bucket + 2 :],
            unword(words[-1].removeprefix("init=")),
        )
    )


def _segment(reader: _Reader, words: list[str]) -> None:
    reader.close()
    reader.segment = {"segment": (name(words[1]),)}


def _segment_part(reader: _Reader, words: list[str]) -> None:
    if not reader.segment:
        raise SyntaxProblem(f"`{words[0]}` outside a segment")
    reader.segment[words[0]] = tuple(words[1:])


def _drop(reader: _Reader, words: list[str]) -> None:
    if words[1] not in TIERS[1:]:
        raise SyntaxProblem(f"there is no tier `{words[1][:60]}` that drops values; tiers are {', '.join(TIERS)}")
    reader.drops.append((words[1], tuple(words[2:])))


def _rebuild(reader: _Reader, words: list[str]) -> None:
    mark = words.index("<-")
    reader.rebuilds.append(Rebuild(words[1], tuple(words[mark + 1 :]), tuple(words[2:mark])))


def _value(reader: _Reader, words: list[str]) -> None:
    reader.values.append((words[1], tensor_type(words[2:])))


def _call(reader: _Reader, words: list[str]) -> None:
    if not reader.segment:
        raise SyntaxProblem("an operator call outside a segment")
    mark = words.index("=")
    operator = words[mark + 1]
    row = OPERATORS.get(operator)
    if row is None:
        raise SyntaxProblem(f"there is no operator `{operator[:60]}`")
    operands = tuple(piece for piece in words[mark + 2 :] if "=" not in piece)
    pairs = (piece.partition("=") for piece in words[mark + 2 :] if "=" in piece)
    if len(operands) != len(row.operands) or mark != len(row.results):
        raise SyntaxProblem(f"{operator} takes {len(row.operands)} operands and gives {len(row.results)} results")
    call = Call(operator, tuple(words[:mark]), operands, tuple((k, attribute(v)) for k, _, v in pairs))
    reader.body.append(call)


def _role(reader: _Reader, words: list[str]) -> None:
    reader.close()
    chunks = whole(words[2].removeprefix("chunks="))
    layers = tuple(map(wholes, words[3].removeprefix("layers=").split(";"))) if chunks else ()
    if len(layers) != chunks:
        raise SyntaxProblem(f"{chunks} chunks but layers of {len(layers)}")
    reader.head = (whole(words[1].removeprefix("pipeline=")), layers)


def _buffer(reader: _Reader, words: list[str]) -> None:
    flat = tensor_type([words[3]])
    place = words[4] if len(words) > 4 else "device"
    if place not in ("device", "host"):
        raise SyntaxProblem(f"a buffer is on the device or the host, not `{place[:60]}`")
    reader.buffers.append(Buffer(name(words[1]), words[2], flat.dtype, flat.elements, place))


def _block(reader: _Reader, words: list[str]) -> None:
    if reader.head is None:
        raise SyntaxProblem("a block outside a role")
    reader.close_list()
    reader.block = (name(words[1]), tuple(words[2:]))


def _order(reader: _Reader, words: list[str]) -> None:
    if reader.head is None:
        raise SyntaxProblem("an order outside a role")
    reader.close_list()
    reader.order = name(words[1])


_SECTIONS: dict[str, Callable[[_Reader, list[str]], None]] = {
    "mesh": _mesh,
    "group": _group,
    "tensor": _tensor,
    "bucket": _bucket,
    "parameter": _parameter,
    "segment": _segment,
    "inputs": _segment_part,
    "parameters": _segment_part,
    "outputs": _segment_part,
    "finals": _segment_part,
    "drop": _drop,
    "rebuild": _rebuild,
    "value": _value,
    "role": _role,
    "buffer": _buffer,
    "block": _block,
    "order": _order,
}


def _line(reader: _Reader, line: str) -> None:
    if line.startswith("set "):
        _set(reader, line)
        return
    words = line.partition("#")[0].split()
    if not words:
        return
    if reader.block and words[0].isdigit():
        if whole(words[0]) != len(reader.listing):
            raise SyntaxProblem(f"instruction {words[0]} where {len(reader.listing)} is due")
        reader.listing.append(instruction(words[1:]))
    elif line.startswith(" ") and reader.order:
        reader.calls += read_calls(line.partition("#")[0])
    elif line.startswith(" ") and "=" in words:
        _call(reader, words)
    elif words[0] in _SECTIONS:
        _SECTIONS[words[0]](reader, words)
    else:
        raise SyntaxProblem(f"no line of a plan begins with `{words[0][:60]}`")


def parse_plan(text: str) -> Plan:
    """The plan of a text.

    Raises PlanFileError T401 when the text is no plan, T402 on another version, T403 with the line on anything else.
    """
    lines = text.split("\n")
    version = _version(lines[0])
    reader = _Reader()
    number = 1
    try:
        for line in lines[1:]:
            number += 1
            _line(reader, line)
        return reader.plan(version)
    except SyntaxProblem as problem:
        raise PlanFileError("T403", str(problem), number) from None
    except (ValueError, KeyError, IndexError, StopIteration, RecursionError, OverflowError) as problem:
        kind, line = type(problem).__name__, lines[number - 1][:80]
        raise PlanFileError("T403", f"malformed line ({kind}): {line}", number) from None


def _version(line: str) -> int:
    words = line.split()
    if words[:2] != ["titan", "plan"] or len(words) < 3:
        raise PlanFileError("T401", "this is not a plan: the first line must be `titan plan VERSION`", 1)
    if words[2] != str(VERSION):
        raise PlanFileError("T402", f"the plan has version {words[2][:20]}, this program reads version {VERSION}", 1)
    return VERSION
