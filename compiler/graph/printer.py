"""The model graph as text: one line per operator or conversion, the layout written into the shape.

    name : dtype[dim, dim/axis] +axis = operator inputs

`/axis` shards a dim, `+axis` marks a partial sum, `^axis` a partial maximum, `~axis` a replicated value with a
partial gradient. Nothing of the compiler reads this text.
"""

from __future__ import annotations

from titan.compiler.graph.model_graph import Convert, ModelGraph, Op, Part, Value
from titan.compiler.plan.layout import sharded_by
from titan.compiler.plan.operators import OPERATORS
from titan.compiler.plan.segment import Segment

_MARKS = {"P": "+", "M": "^", "R": "~"}


def print_graph(graph: ModelGraph, maker: str = "build", parts: tuple[str, ...] = ()) -> str:
    """Whole text, or only the named parts; `maker` names the pass that made the graph."""
    mesh = " ".join(f"{name}={size}" for name, size in graph.mesh.factors if size > 1) or "one rank"
    blocks = [f"# after {maker}   mesh {mesh}"]
    for index, part in enumerate(graph.parts):
        if not parts or part.name in parts:
            blocks.append("\n".join(_part_lines(part, _place(graph, index))))
    return "\n\n".join(blocks) + "\n"


def _place(graph: ModelGraph, index: int) -> str:
    """Which layers a part stands for."""
    layers = [layer for number, layer in graph.chain if number == index and layer is not None]
    if not layers:
        return ""
    return f"   layers {layers[0]}-{layers[-1]} ({len(layers)} of them)"


def _part_lines(part: Part, place: str) -> list[str]:
    table = part.table
    lines = [f"part {part.name}{place}"]
    lines += [f"  in {value_text(table[name])}" for name in part.inputs]
    lines += [f"  {row}" for step in part.steps for row in _rows(step, table)]
    return [*lines, f"  out {' '.join(part.outputs)}"]


def _rows(step: Op | Convert | Segment, table: dict[str, Value]) -> list[str]:
    if isinstance(step, Convert):
        return [f"{value_text(table[step.result])} = {_conversion(step)}"]
    if isinstance(step, Op):
        return [_call(step.operator, step.results, step.operands, table) + _rules(step, table)]
    body = [f"  {_call(call.operator, call.results, call.operands, table)}" for call in step.body]
    return [f"segment {step.name}", *body, *_tiers(step)]


def _tiers(step: Segment) -> list[str]:
    """What recompute tiers drop of the segment's frame, and what they run again from what."""
    drops = [f"  {tier} drops {' '.join(values)}" for tier, values in step.drops]
    made = [(r.tier, " ".join(("the frame", *r.writes)), " ".join(r.reads)) for r in step.rebuilds]
    return [*drops, *(f"  {tier} makes {what} again <- {reads}" for tier, what, reads in made)]


def _call(operator: str, results: tuple[str, ...], operands: tuple[str, ...], table: dict[str, Value]) -> str:
    """Main results in full, statistics kept for the backward by name."""
    main = len(OPERATORS[operator].main_results)
    written = (*(value_text(table[name]) for name in results[:main]), *results[main:])
    return f"{', '.join(written)} = {operator} {', '.join(operands)}"


def _rules(op: Op, table: dict[str, Value]) -> str:
    """Which of the operator's dims each factor shards: what passes decided before there are layouts."""
    if any(value.layout for value in table.values()):
        return ""
    here = {dim for operand in op.operands for dim in table[operand].dims}
    rules = ((factor, ",".join(sorted(dims & here))) for factor, dims in op.shards)
    return "".join(f"  /{factor}: {dims}" for factor, dims in rules if dims)


def _conversion(step: Convert) -> str:
    """Forward and backward of a conversion; dims in the order from, to."""
    dims = [str(dim) for dim in (step.source_dim, step.target_dim) if dim is not None]
    where = f" dim {' to '.join(dims)}" if dims else ""
    kind = " max" if step.reduction == "max" else ""
    return f"{step.forward}{kind} {step.source} @{step.group}{where}   (backward {step.backward})"


def value_text(value: Value) -> str:
    """`h : bf16[batch/data, sequence, hidden] +tensor`."""
    dims = ["/".join((dim, *sharded_by(value.layout, position))) for position, dim in enumerate(value.dims)]
    marks = "".join(f" {_MARKS[state]}{factor}" for factor, state in value.layout if state in _MARKS)
    return f"{value.name} : {value.dtype}[{', '.join(dims)}]{marks}"
