"""Proof (f): no operator reads a partial value as a value, and no gradient sum is missing or done twice.

Segment bodies are worked out again from the operators' rows; every register given to a segment has the type of its
formal; every collective is a conversion of the one table between its source's and its target's layouts; and a bucket
is summed over exactly the factors on which its parameters' gradients are partial. A gradient lies as its value's dual.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from titan.compiler.plan.alike import Like
from titan.compiler.plan.instruction import BACK, Instruction, type_name
from titan.compiler.plan.layout import CONVERSIONS, Layout, dual, sharded_by, state
from titan.compiler.plan.mesh import Mesh
from titan.compiler.plan.operators import TensorType, statistics_dtype
from titan.compiler.plan.program import Bucket, Parameter, Plan, Role
from titan.compiler.plan.segment import bind, parse_unit
from titan.compiler.verify.bodies import active, check_body, whole_shape
from titan.compiler.verify.findings import MOST, Finding, at, found_alike
from titan.compiler.verify.units import buffer_name, expected

FRAMES = ("f", "fs", "fn", "wf")
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")


def readable(found: Layout, wanted: Layout, factors: tuple[str, ...]) -> bool:
    """Whether a register may be read as the formal: equal, or replicated where `R` is wanted (the free conversion)."""
    return all(state(found, f) in (state(wanted, f), "I" if state(wanted, f) == "R" else "") for f in factors)


class _Checker:
    """One plan; what was found about a combination of types is remembered, for all layers are alike."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.factors = active(plan.mesh)
        self.keys: dict[str, str] = {}
        self.known: dict[tuple[object, ...], str] = {}
        self.units: dict[Instruction, str] = {}  # compute instructions, of which blocks have many in common
        self.uses: dict[tuple[str, str], Layout] = {}  # (parameter, segment) -> layout in which it is read
        self.bound: set[str] = set()

    def key(self, register: str) -> str:
        found = self.keys.get(register)
        if found is None:
            found = self.keys[register] = type_name(register)
        return found

    def unit(self, instruction: Instruction) -> str:
        if instruction not in self.units:
            self.units[instruction] = self.computed(instruction)
        return self.units[instruction]

    def computed(self, instruction: Instruction) -> str:
        name, _ = parse_unit(instruction.unit)
        try:
            wanted = expected(self.plan, instruction)
        except ValueError as problem:
            return str(problem)
        registers = len(instruction.reads) - len(wanted.parameters)
        read = tuple(buffer_name(self.plan, n) for n in instruction.reads[max(registers, 0) :])
        added = tuple(buffer_name(self.plan, n) for n in instruction.updates)
        if read != wanted.parameters or added != wanted.gradients:
            held = ", ".join((*wanted.parameters, *(f"^{g}" for g in wanted.gradients)))
            return f"{instruction.opcode} of {instruction.unit} must end with the buckets {held}"
        reads = instruction.reads[:registers]
        counted = (len(instruction.writes), len(reads))
        if counted != (len(wanted.writes), len(wanted.reads)):
            return (
                f"{instruction.opcode} of {name} writes {len(wanted.writes)} and reads {len(wanted.reads)} registers, "
                f"here are {counted[0]} and {counted[1]}"
            )
        wrong = _frame(instruction, instruction.writes, wanted.writes) or _frame(instruction, reads, wanted.reads)
        if wrong:
            return wrong
        symbols = {r.partition(":")[2] for r in (*instruction.writes, *reads)} - {""}
        if len(symbols) > 1:
            return f"mixes the micro-batches {', '.join(sorted(symbols))}"
        return self.operands(name, instruction, wanted.writes, instruction.writes) or self.operands(
            name, instruction, wanted.reads, reads
        )

    def operands(self, segment: str, instruction: Instruction, formals: tuple[str, ...], given: tuple[str, ...]) -> str:
        written = given is instruction.writes
        keys = tuple(map(self.key, given))
        memo = (segment, written, formals, keys)
        if memo not in self.known:
            problems = (self.operand(segment, formal, key, written) for formal, key in zip(formals, keys, strict=True))
            self.known[memo] = next((p for p in problems if p), "")
        return self.known[memo]

    def operand(self, segment: str, formal: str, key: str, written: bool) -> str:
        """One register against its formal, by type."""
        if formal in FRAMES:
            return ""
        gradient = formal.startswith("d.") and formal not in self.plan.segment_table[segment].types
        wanted = self.plan.segment_table[segment].types[formal.removeprefix("d.") if gradient else formal]
        layout = dual(wanted.layout) if gradient else wanted.layout
        dtype = wanted.dtype
        if gradient and formal.removeprefix("d.") in self.plan.segment_table[segment].wide:
            dtype = statistics_dtype(dtype)
        found = self.plan.types.get(key)
        if found is None:
            return f"`{key}` has no type"
        if (found.dtype, found.shape) != (dtype, wanted.shape):
            demand = f"{dtype}{list(wanted.shape)}"
            return f"`{key}` is {found.dtype}{list(found.shape)}, {segment} wants {formal} as {demand}"
        fits = _same(found.layout, layout, self.factors) if written else readable(found.layout, layout, self.factors)
        return "" if fits else f"`{key}` lies {_shown(found.layout)}, {segment} wants {formal} {_shown(layout)}"

    def bind(self, unit: str) -> None:
        """Notes in which layout the unit reads its parameters."""
        if unit in self.bound:
            return
        self.bound.add(unit)
        name, layer = parse_unit(unit)
        segment = self.plan.segment_table[name]
        for formal in segment.parameters:
            self.uses[bind(formal, layer), name] = segment.types[formal].layout

    def collective(self, instruction: Instruction, buffers: dict[str, TensorType]) -> str:
        source, target = instruction.reads[:1], instruction.writes[0].rstrip("?")
        if not source:
            return ""  # a member that only receives a broadcast
        memo = (instruction.opcode, self.key(source[0]), self.key(target), instruction.group, instruction.attributes)
        if memo not in self.known:
            before, after = buffers.get(source[0]) or self.plan.types[memo[1]], self.plan.types[memo[2]]
            scalar = before.shape == after.shape == () and not before.layout  # which ranks: proof (d)
            if scalar or instruction.opcode == "broadcast":
                self.known[memo] = "" if before == after else f"{_typed(before)} becomes {_typed(after)}"
            else:
                self.known[memo] = convert(instruction, before, after, self.plan, self.factors)
        found = self.known[memo]
        symbols = {n.rstrip("?").partition(":")[2] for n in (*source, target)}
        return found or ("" if len(symbols) == 1 else f"mixes the micro-batches {', '.join(sorted(symbols))}")

    def norm(self, instruction: Instruction, buffers: dict[str, TensorType]) -> str:
        """The squared norm has the gradients' dtype."""
        found = self.plan.types[self.key(instruction.writes[0])]
        wrong = [n for n in instruction.reads if buffers[n].dtype != found.dtype]
        if wrong or found.shape != ():
            return f"the norm of {wrong[0] if wrong else 'gradients'} is a scalar of their dtype, not {_typed(found)}"
        return ""

    def summed(self, instruction: Instruction, buffers: dict[str, TensorType]) -> str:
        """Operands of `add` and `loss`."""
        names = (*instruction.writes, *instruction.reads)
        types = [self.plan.types[self.key(n)] for n in names]
        if any(buffers[n].dtype != types[-1].dtype for n in instruction.updates):
            return "the sum of losses has another dtype than the loss"
        if instruction.opcode == "loss":
            if types[-1].shape != () or (len(types) == 2 and types[0].layout != dual(types[1].layout)):
                return "the loss is a scalar and its gradient lies as its dual"
        elif any(t != types[0] for t in types) or len({n.partition(":")[2] for n in names}) > 1:
            return "sums registers of different type or micro-batch"
        return ""


def _frame(instruction: Instruction, registers: tuple[str, ...], formals: tuple[str, ...]) -> str:
    """Pieces of frames go by the names of their unit; a recompute makes its own, which only backward reads."""
    opcode = instruction.opcode
    made = registers is instruction.writes
    for register, formal in zip(registers, formals):
        if formal in FRAMES:
            plain, again = f"{formal}.{instruction.unit}", f"r.{formal}.{instruction.unit}"
            allowed: tuple[str, ...] = (again,) if opcode == "recompute" and made else (plain,)
            if opcode.startswith("backward") and not made and formal in ("fs", "fn"):
                allowed = (plain, again)
            if not made and formal != "wf":
                allowed = (*allowed, BACK + plain)
            if register.partition(":")[0] not in allowed:
                return f"`{register}` is not the frame of {instruction.unit}"
    return ""


def _same(found: Layout, wanted: Layout, factors: tuple[str, ...]) -> bool:
    return all(state(found, f) == state(wanted, f) for f in factors)


def _typed(tensor: TensorType) -> str:
    return f"{tensor.dtype}{list(tensor.shape)} {_shown(tensor.layout)}"


def _shown(layout: Layout) -> str:
    return " ".join(f"{s}@{f}" for f, s in layout) or "replicated"


def convert(
    instruction: Instruction, before: TensorType, after: TensorType, plan: Plan, factors: tuple[str, ...]
) -> str:
    """Whether a collective makes `after` of `before`: what is wrong, or ""."""
    mesh, opcode = plan.mesh, instruction.opcode
    group = tuple(f for f in mesh.resolve(instruction.group) if mesh.size(f) > 1)
    if before.dtype != after.dtype:
        return f"{opcode} turns {before.dtype} into {after.dtype}"
    for factor in factors:
        source, target = state(before.layout, factor), state(after.layout, factor)
        if factor not in group:
            if source != target:
                return f"{opcode} over {instruction.group} cannot turn {source} on {factor} into {target}"
            continue
        row = CONVERSIONS.get((source[0], target[0]))
        if row is None or row.forward != opcode:
            return f"{opcode} turns no {source} into {target} on {factor}"
        wrong = _attributes(instruction, source, target)
        if wrong:
            return wrong
    if not group:
        return f"group {instruction.group} has one member: nothing to exchange"
    return _pieces(instruction, before, after, group, mesh)


def _attributes(instruction: Instruction, source: str, target: str) -> str:
    given = dict(instruction.attributes)
    wanted: dict[str, object] = {
        "all_gather": {"dim": source[1:]},
        "reduce_scatter": {"dim": target[1:]},
        "all_to_all": {"concat": source[1:], "split": target[1:]},
        "all_reduce": {"op": "max" if source == "M" else "sum"},
    }.get(instruction.opcode, {})  # type: ignore[assignment]
    for key, value in wanted.items():
        if str(given[key]) != value:
            return f"{instruction.opcode} from {source} to {target} has {key}={value}, not {given[key]}"
    return ""


def _pieces(instruction: Instruction, before: TensorType, after: TensorType, group: tuple[str, ...], mesh: Mesh) -> str:
    """Global shapes agree, and gathered or split dims are held by the group innermost: pieces are not interleaved."""
    wholes = [list(whole_shape(tensor, mesh)) for tensor in (before, after)]
    if wholes[0] != wholes[1]:
        return f"{instruction.opcode} turns a tensor of {wholes[0]} into {wholes[1]}"
    for tensor in (before, after):
        for dim in range(len(tensor.shape)):
            held = sharded_by(tensor.layout, dim)
            mine = [f for f in held if f in group]
            if mine and list(held[len(held) - len(mine) :]) != mine:
                return f"{instruction.opcode}: {instruction.group} is not innermost on dim {dim}"
    return ""


def _programs(likes: tuple[Like, ...], checker: _Checker) -> list[Finding]:
    found: list[Finding] = []
    units: dict[int, dict[str, None]] = {}
    for like in likes:
        if like.first is like.role:
            units[like.role.pipeline] = {i.unit: None for b in like.role.blocks for i in b.instructions}
            found += _role(like.role, checker)
            if len(found) >= MOST:
                return found[:MOST]
        for unit in filter(None, map(like.renaming.name, units[like.first.pipeline])):
            checker.bind(unit)
    return found


def _role(role: Role, checker: _Checker) -> Iterator[Finding]:
    buffers = {b.name: TensorType(b.dtype, () if b.kind == "metric" else (b.elements,)) for b in role.buffers}
    for block in role.blocks:
        for index, instruction in enumerate(block.instructions):
            opcode = instruction.opcode
            wrong = ""
            if instruction.unit:
                wrong = checker.unit(instruction)
            elif opcode in _COLLECTIVES:
                wrong = checker.collective(instruction, buffers)
            elif opcode == "grad_norm":
                wrong = checker.norm(instruction, buffers)
            elif opcode in ("add", "loss"):
                wrong = checker.summed(instruction, buffers)
            if wrong:
                code = "T762" if opcode in _COLLECTIVES else "T761"
                yield at(code, wrong, role, block, index)


def _parameter(plan: Plan, parameter: Parameter, layouts: set[Layout]) -> str:
    """Parameter, bucket and use agree about where pieces lie and what has to be summed."""
    bucket, mesh = plan.bucket_table[parameter.bucket], plan.mesh
    if not layouts:
        return "no segment reads it"
    if len(layouts) > 1:
        return "it is read in two layouts"
    layout = next(iter(layouts))
    shards = {f: s for f, s in layout if s.startswith("V") and mesh.size(f) > 1}
    if shards != {f: s for f, s in parameter.tensor.layout if mesh.size(f) > 1}:
        return f"it is read as {_shown(layout)} but stored as {_shown(parameter.tensor.layout)}"
    if whole_shape(parameter.tensor, mesh) != parameter.shape:
        return f"its pieces make {list(whole_shape(parameter.tensor, mesh))}, its shape is {list(parameter.shape)}"
    if not 0 < parameter.rows <= parameter.shape[0] or parameter.tensor.dtype != bucket.dtype:
        return "its rows or dtype do not fit its shape and bucket"
    partial = sorted(f for f, s in layout if s == "R" and mesh.size(f) > 1)
    summed = sorted(f for g in (*bucket.sums, bucket.replicas) if g for f in mesh.resolve(g) if mesh.size(f) > 1)
    if partial != summed:
        return f"its gradient is partial on {partial or 'no factor'}, the bucket is summed over {summed or 'none'}"
    return _counted(plan, bucket, set(shards))


def _counted(plan: Plan, bucket: Bucket, shards: set[str]) -> str:
    """`uncounted` is every factor whose ranks hold equal gradients in the end."""
    mesh, declared = plan.mesh, plan.group_table.get(bucket.shards)
    own = set(mesh.resolve(declared.axes if declared else bucket.shards)) if bucket.sharded else set()
    if declared and declared.pipeline != bucket.homes:
        return f"its shards lie on stages {declared.pipeline}, its homes are {bucket.homes}"
    equal = {f for f in active(mesh) if f not in shards and f not in own}
    given = {f for f in mesh.resolve(bucket.uncounted) if mesh.size(f) > 1}
    if equal != given:
        return f"ranks hold equal gradients along {sorted(equal)}, left out of the norm are {sorted(given)}"
    return ""


def _stored(plan: Plan, checker: _Checker) -> list[Finding]:
    found = []
    layouts: dict[str, set[Layout]] = {}
    for (name, _), layout in checker.uses.items():
        layouts.setdefault(name, set()).add(tuple(sorted(layout)))
    ends: dict[str, int] = {}
    known: dict[tuple[object, ...], str] = {}
    forms = {bucket.name: replace(bucket, name="", elements=0) for bucket in plan.buckets}
    for parameter in sorted(plan.parameters, key=lambda p: (p.bucket, p.offset)):
        read = layouts.get(parameter.name, set())
        form = (parameter.shape, parameter.rows, parameter.tensor, forms[parameter.bucket], *read)
        if form not in known:
            known[form] = _parameter(plan, parameter, read)
        wrong = known[form]
        if parameter.offset < ends.get(parameter.bucket, 0):
            wrong = wrong or "it overlaps another parameter of its bucket"
        ends[parameter.bucket] = parameter.offset + parameter.tensor.elements
        if wrong:
            found.append(Finding("T763", f"parameter {parameter.name} of bucket {parameter.bucket}: {wrong}"))
    for bucket in plan.buckets:
        degree = plan.group_size(bucket.shards) if bucket.shards else 1
        if bucket.sharded and (degree == 1 or bucket.elements % degree):
            message = f"bucket {bucket.name}: {bucket.elements} elements cannot be sharded over {degree} ranks"
            found.append(Finding("T763", message))
    return found


def _gradients(plan: Plan, factors: tuple[str, ...]) -> list[Finding]:
    """Types of gradients are the duals of their values' types."""
    found = []
    for name, tensor in plan.tensors:
        if not name.startswith("d."):
            continue
        head, mark, number = name[2:].rpartition(".")
        value = plan.types.get(name[2:]) or (plan.types.get(head) if mark and number.isdigit() else None)
        if value is None:
            found.append(Finding("T764", f"tensor {name} is the gradient of nothing"))
        elif (
            tensor.dtype not in (value.dtype, statistics_dtype(value.dtype))  # which: the operators' rows say it
            or value.shape != tensor.shape
            or not _same(tensor.layout, dual(value.layout), factors)
        ):
            wanted = f"{value.dtype}{list(value.shape)} {_shown(dual(value.layout))}"
            found.append(Finding("T764", f"tensor {name} must be {wanted}"))
    return found


def layout(plan: Plan) -> list[Finding]:
    """Findings of proof (f)."""
    found = [finding for segment in plan.segments for finding in check_body(segment, plan.mesh)]
    if found:
        return found
    checker = _Checker(plan)
    found = _gradients(plan, checker.factors) + found_alike(plan, lambda likes: _programs(likes, checker))
    return found or _stored(plan, checker)
