"""Segments: cuts a part at its conversions into the largest pieces with no communication inside."""

from __future__ import annotations

from dataclasses import replace

from titan.compiler.graph.model_graph import Convert, ModelGraph, Op, Part
from titan.compiler.plan.mesh import Mesh
from titan.compiler.plan.segment import Call, Segment
from titan.compiler.strategy import Strategy


def segments(graph: ModelGraph, strategy: Strategy) -> ModelGraph:
    """Groups operators between conversions into segments: nothing may insert communication after this."""
    return graph.with_parts(tuple(_cut(part, graph.mesh) for part in graph.parts))


def _cut(part: Part, mesh: Mesh) -> Part:
    groups: list[list[Op] | Convert] = []
    open_group: list[Op] = []
    for step in part.steps:
        if isinstance(step, Op) and not step.row.alone:
            open_group.append(step)
        elif isinstance(step, Op):
            groups += [open_group, [step]] if open_group else [[step]]
            open_group = []
        elif isinstance(step, Convert):
            if open_group:
                groups.append(open_group)
                open_group = []
            groups.append(step)
    if open_group:
        groups.append(open_group)
    read_later = _readers(part, groups)
    finals = _finals(part)
    steps: list[Op | Convert | Segment] = []
    prefix, number = part.name if part.repeated else f"{part.name}.", 0
    for index, group in enumerate(groups):
        if isinstance(group, Convert):
            steps.append(group)
        else:
            read = read_later[index] | frozenset(finals.values())
            steps.append(_segment(f"{prefix}{number}", group, part, mesh, read, finals))
            number += 1
    return replace(part, steps=tuple(steps))


def _readers(part: Part, groups: list[list[Op] | Convert]) -> list[frozenset[str]]:
    """For each group the names read by any other group or leaving the part."""
    reads: list[set[str]] = []
    for group in groups:
        reads.append({group.source} if isinstance(group, Convert) else {o for op in group for o in op.operands})
    return [
        frozenset(set(part.outputs).union(*(names for other, names in enumerate(reads) if other != index)))
        for index in range(len(groups))
    ]


def _finals(part: Part) -> dict[str, str]:
    """What partial results become in the end: an operator that accumulates goes on with them."""
    found: dict[str, str] = {}
    for step in reversed(part.steps):
        if isinstance(step, Op):
            named = dict(zip(step.row.operands + step.row.results, step.operands + step.results, strict=True))
            for partial, result in step.row.accumulates:
                found[named[partial]] = found.get(named[result], named[result])
    return found


def _segment(
    name: str, ops: list[Op], part: Part, mesh: Mesh, read_later: frozenset[str], finals: dict[str, str]
) -> Segment:
    table = part.table
    produced = [result for op in ops for result in op.results]
    read = [o for op in ops for o in op.operands if o not in produced]
    outside = tuple(dict.fromkeys(read))
    body = tuple(Call(op.operator, op.results, op.operands, op.attributes) for op in ops)
    becomes = tuple((v, finals[v]) for v in produced if v in finals)
    names = (*outside, *produced, *(final for _, final in becomes))
    return Segment(
        name,
        inputs=tuple(v for v in outside if table[v].kind != "parameter"),
        parameters=tuple(v for v in outside if table[v].kind == "parameter"),
        outputs=tuple(v for v in produced if v in read_later),
        body=body,
        values=tuple((v, table[v].local(mesh)) for v in names),
        finals=becomes,
    )
