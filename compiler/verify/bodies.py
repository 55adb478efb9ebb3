"""Segment bodies checked call by call: states, shapes and dtypes follow from the operators' rows, not the declarations.

Also where pieces of sharded tensors begin: operators that must know their place on the global tensor carry it as an
attribute, which has to agree with the layout.
"""

from __future__ import annotations

from math import prod

from titan.compiler.plan.layout import sharded_by, state
from titan.compiler.plan.mesh import Mesh
from titan.compiler.plan.operators import LayoutError, TensorType, result_state
from titan.compiler.plan.segment import TIERS, Call, Segment
from titan.compiler.verify.findings import Finding

# operator -> operand and dim whose first global index the attribute `start` is
STARTS = {
    "embedding": ("table", 0),
    "add_positions": ("x", 1),
    "rope": ("x", 1),
    "dropout": ("x", 1),
    "attention": ("q", 1),
    "attention_documents": ("q", 1),
    "add_positions_documents": ("x", 1),
    "vocab_max": ("logits", 2),
    "vocab_sum": ("logits", 2),
    "linear_vocab_max": ("weight", 0),
    "linear_vocab_sum": ("weight", 0),
}


GATHERING = ("attention", "attention_documents")  # keys may be longer than queries


def coefficients(expression: object, mesh: Mesh) -> dict[str, int] | None:
    """A coordinate expression as the stride of each factor: `@context*4+@tensor*2`; None when it is not one."""
    if isinstance(expression, int) and not isinstance(expression, bool):
        return {} if expression == 0 else None
    if not isinstance(expression, str) or not expression.startswith("@"):
        return None
    found: dict[str, int] = {}
    for term in expression.split("+"):
        group, _, stride = term.removeprefix("@").rpartition("*")
        if not stride.isdigit() or not group:
            return None
        step = int(stride)
        for factor in reversed(mesh.resolve(group)):
            found[factor] = found.get(factor, 0) + step
            step *= mesh.size(factor)
    return {factor: step for factor, step in found.items() if mesh.size(factor) > 1 and step}


def first_index(tensor: TensorType, dim: int, mesh: Mesh, skip: tuple[str, ...] = ()) -> dict[str, int]:
    """Strides with which a rank's coordinates give the first global index of its piece along a dim."""
    found: dict[str, int] = {}
    step = tensor.shape[dim]
    for factor in reversed(sharded_by(tensor.layout, dim)):
        if factor not in skip:
            found[factor] = step
        step *= mesh.size(factor)
    return {factor: step for factor, step in found.items() if mesh.size(factor) > 1}


def _start(call: Call, segment: Segment, mesh: Mesh) -> str:
    if call.operator not in STARTS:
        return ""
    operand, dim = STARTS[call.operator]
    named = dict(zip(call.row.operands, call.operands, strict=True))
    skip = sharded_by(segment.types[named["k"]].layout, 1) if call.operator in GATHERING else ()
    expected = first_index(segment.types[named[operand]], dim, mesh, skip)
    given = coefficients(dict(call.attributes).get("start", 0), mesh)
    if given == expected:
        return ""
    wanted = "+".join(f"@{f}*{s}" for f, s in expected.items()) or "0"
    return f"{call.operator} starts at {dict(call.attributes).get('start')}, its {operand} at {wanted}"


def _states(call: Call, segment: Segment, factors: tuple[str, ...]) -> str:
    """Layouts of the main results, factor by factor."""
    types = segment.types
    for factor in factors:
        operands = tuple(state(types[o].layout, factor) for o in call.operands)
        try:
            expected = result_state(call.row, factor, operands)
        except LayoutError as problem:
            return str(problem)
        for result, wanted in zip(call.results, expected, strict=False):
            found = state(types[result].layout, factor)
            if found != wanted:
                return f"{call.operator} gives `{result}` as {wanted} on {factor}, declared is {found}"
    return ""


def _call(call: Call, segment: Segment, defined: set[str], mesh: Mesh, factors: tuple[str, ...]) -> str:
    row, types = call.row, segment.types
    for name in (*call.operands, *call.results):
        if name not in types:
            return f"`{name}` has no type"
    for name in call.operands:
        if name not in defined:
            return f"`{name}` is read before it is made"
    for name, operand in zip(row.operands, call.operands, strict=True):
        if (name in row.parameters) != (operand in segment.parameters):
            return f"{call.operator}: operand {name} must {'' if name in row.parameters else 'not '}be a parameter"
    given = row.typing(dict(call.attributes), tuple(types[o] for o in call.operands))
    for result, (dtype, shape) in zip(call.results, given, strict=True):
        if (types[result].dtype, types[result].shape) != (dtype, shape):
            declared = f"{types[result].dtype}{list(types[result].shape)}"
            return f"{call.operator} gives `{result}` as {dtype}{list(shape)}, declared is {declared}"
    return _shapes(call, segment) or _states(call, segment, factors) or _start(call, segment, mesh)


def _shapes(call: Call, segment: Segment) -> str:
    """Dims with one label have one size, on all operands and results (dims of parameters that stay whole excepted)."""
    sizes: dict[str, int] = {}
    row, types = call.row, segment.types
    left, right = row.labels
    free = {"p", *row.resizes} | ({"s", "t"} if call.operator in GATHERING else set())
    for labels, name in zip((*left, *right), (*call.operands, *call.results), strict=False):
        shape = types[name].shape
        if len(shape) != len(labels):
            return f"{call.operator}: `{name}` has {len(shape)} dims, the row says {len(labels)}"
        for label, size in zip(labels, shape, strict=True):
            if label not in free and sizes.setdefault(label, size) != size:
                return f"{call.operator}: dim {label} of `{name}` is {size}, elsewhere {sizes[label]}"
    return ""


def active(mesh: Mesh) -> tuple[str, ...]:
    """Factors that lay out tensors: more than one rank, and not the pipeline."""
    return tuple(f for f, size in mesh.factors if size > 1 and f != "pipeline")


def check_body(segment: Segment, mesh: Mesh) -> list[Finding]:
    """Findings of one template, at most one per call."""
    found = []
    factors = active(mesh)
    defined = {*segment.inputs, *segment.parameters}
    missing = [v for v in (*segment.inputs, *segment.parameters) if v not in segment.types]
    if missing:
        return [Finding("T760", f"segment {segment.name}: `{missing[0]}` has no type")]
    for number, call in enumerate(segment.body):
        wrong = _call(call, segment, defined, mesh, factors)
        if wrong:
            found.append(Finding("T760", f"segment {segment.name}, call {number}: {wrong}"))
        defined.update(call.results)
    found += _finals(segment) + _wide(segment)
    missing = [v for v in segment.outputs if v not in defined]
    if missing:
        found.append(Finding("T760", f"segment {segment.name}: output `{missing[0]}` is never made"))
    wrong = "" if found else _drops(segment) or next(filter(None, (_rebuild(segment, t) for t in TIERS[1:])), "")
    return [*found, Finding("T765", f"segment {segment.name}: {wrong}")] if wrong else found


def _drops(segment: Segment) -> str:
    """Only values of the frame are dropped, each by one tier."""
    dropped = [v for _, values in segment.drops for v in values]
    wrong = [v for v in dropped if v not in segment.frame or dropped.count(v) > 1]
    twice = len({r.tier for r in segment.rebuilds}) < len(segment.rebuilds)
    twice = twice or any(tier not in TIERS for tier, _ in segment.drops)
    return f"`{wrong[0]}` is no value of the frame, or dropped twice" if wrong else "a tier twice" if twice else ""


def _rebuild(segment: Segment, tier: str) -> str:
    """What a tier does not store can be made again from what is there."""
    again, stored = segment.rebuild(tier), segment.stored(tier)
    missing = [v for piece, values in segment.pieces.items() if piece not in stored for v in values]
    if again is None:
        return f"tier {tier} drops `{missing[0]}` and never rebuilds it" if missing else ""
    wrong = [v for v in again.reads if v not in (*segment.inputs, *segment.outputs)]
    wrong += [v for v in again.writes if v not in segment.outputs or v in again.reads]
    defined = {*again.reads, *segment.parameters, *(v for piece in stored for v in segment.pieces[piece])}
    for call in segment.rebuild_body(tier):
        wrong += [v for v in call.operands if v not in defined]
        defined.update(call.results)
    wrong += [v for v in (*missing, *again.writes) if v not in defined]
    return f"tier {tier} cannot rebuild from `{wrong[0]}`" if wrong else ""


def _finals(segment: Segment) -> list[Finding]:
    """Only results that an operator can go on with are partial; the final one differs in nothing but its dtype."""
    found = []
    able = {
        value
        for call in segment.body
        for name, value in zip(call.row.results, call.results, strict=True)
        if call.row.alone and name in ("out", "lse")
    }
    for partial, final in segment.finals:
        types = [segment.types.get(v) for v in (partial, final)]
        if partial not in able or partial not in segment.outputs or None in types:
            found.append(Finding("T760", f"segment {segment.name}: `{partial}` is no partial result of it"))
        elif (types[0].shape, types[0].layout) != (types[1].shape, types[1].layout):  # type: ignore[union-attr]
            found.append(Finding("T760", f"segment {segment.name}: `{final}` lies otherwise than `{partial}`"))
    return found


def _wide(segment: Segment) -> list[Finding]:
    """All who read or make a value agree whether its gradient is wide."""
    found = []
    for call in segment.body:
        row = call.row
        for name, value in zip(row.operands + row.results, call.operands + call.results, strict=True):
            counts = value in segment.differentiable and name not in row.data and name not in row.auxiliary
            if counts and value in segment.wide and name not in row.wide:
                message = f"{call.operator} gives `{value}` a gradient of its own dtype, others a wide one"
                found.append(Finding("T760", f"segment {segment.name}: {message}"))
    return found


def whole_shape(tensor: TensorType, mesh: Mesh) -> tuple[int, ...]:
    """Global shape of a tensor of which each rank holds a piece."""
    return tuple(
        size * prod(mesh.size(f) for f in sharded_by(tensor.layout, dim)) for dim, size in enumerate(tensor.shape)
    )
