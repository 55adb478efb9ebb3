"""Proof (e): every token of the global batch is read exactly once, and its labels beside it.

The ranks that share neither data nor context coordinate read different pieces: the piece along the batch follows from
the data coordinate, the piece along the sequence from `start` and `length`; micro-batches are the block's parameter. A
sequence may be filled up at its end with places that hold no token.
"""

from __future__ import annotations

from titan.compiler.plan.alike import Like
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.instruction import Instruction, type_name
from titan.compiler.plan.layout import sharded_by
from titan.compiler.plan.listing import text
from titan.compiler.plan.program import Block, Plan, Role
from titan.compiler.plan.segment import parse_unit
from titan.compiler.verify.bodies import coefficients, first_index, whole_shape
from titan.compiler.verify.findings import Finding, at, found_alike, shown, used_blocks
from titan.compiler.verify.rings import bare, filled_up, permutations
from titan.compiler.verify.updates import Step, _factors, _trace

_Loads = dict[str, list[tuple[int, str, str]]]  # block -> where, which, and for which of its micro-batches
_KINDS = ("tokens", "labels")
_READ = (*_KINDS, "starts")  # `starts`: where each token's document begins; as often as operators need it


def _batch(plan: Plan, instruction: Instruction) -> str:
    """One load of tokens or labels against its type and the plan's batch."""
    register = instruction.writes[0]
    tensor, mesh = plan.types[type_name(register)], plan.mesh
    given = dict(instruction.attributes)
    sequence, rows = filled_up(plan), plan.setting("train.micro_batch")
    data = mesh.size("data")
    if ":" not in register or given.get("micro_batch") != register.partition(":")[2]:
        return f"`{register}` must be loaded for its own micro-batch, not for {given.get('micro_batch')}"
    if tensor.dtype != "i64" or len(tensor.shape) != 2:
        return f"{given['what']} are i64[sequences, tokens]"
    if whole_shape(tensor, mesh) != (rows * data, sequence):
        read = list(whole_shape(tensor, mesh))
        return f"all ranks together read {read} tokens, a micro-batch has {[rows * data, sequence]}"
    along = {f for f in sharded_by(tensor.layout, 0) if mesh.size(f) > 1}
    if along != {f for f in mesh.resolve("data") if mesh.size(f) > 1}:
        return f"sequences are divided over data, the register's over {sorted(along) or 'nothing'}"
    if given.get("length") != tensor.shape[1]:
        return f"length={given.get('length')} but the register holds {tensor.shape[1]}"
    if coefficients(given.get("start", 0), mesh) != first_index(tensor, 1, mesh):
        wanted = "+".join(f"@{f}*{s}" for f, s in first_index(tensor, 1, mesh).items()) or "0"
        return f"start={given.get('start')} but this rank's piece begins at {wanted}"
    return ""


def _loads(plan: Plan, role: Role) -> list[Finding]:
    """Every load of the role against the plan's batch."""
    return [
        at("T750", wrong, role, block, index)
        for block in role.blocks
        for index, instruction in enumerate(block.instructions)
        if instruction.opcode == "load_batch" and instruction.attribute("what") in _READ
        for wrong in (_batch(plan, instruction),)
        if wrong
    ]


def _times(plan: Plan, order: str, loads: dict[int, _Loads]) -> list[Finding]:
    """Over all roles every micro-batch's tokens and labels are loaded once."""
    count = int(plan.setting("train.micro_batches") or 0)
    read: dict[str, dict[int, int]] = {what: {} for what in _KINDS}
    found = []
    for role in (role for role in plan.roles if role.pipeline in loads):
        mine = loads[role.pipeline]
        for position, call in ((n, call) for n, call in enumerate(role.order(order)) if call.block in mine):
            block = role.block_table[call.block]
            for index, what, symbol in mine[call.block]:
                batch = dict(zip(block.parameters, call.arguments, strict=True)).get(symbol, -1)
                if batch in read[what]:
                    message = f"{what} of micro-batch {batch} are loaded twice in order {order}"
                    found.append(at("T750", message, role, block, index, position))
                read[what][batch] = role.pipeline
    for what, batches in read.items():
        missing = sorted(set(range(count)) ^ batches.keys())
        if missing:
            message = f"order {order}: {what} of micro-batch {missing[0]} are not loaded, or not in the plan's {count}"
            found.append(Finding("T750", message, *_somewhere(plan, what)))
    return found


def _loading(plan: Plan) -> dict[int, _Loads]:
    """By stage and block, where there is any, what is loaded. No layer is in that: of roles that are alike all load
    what one does."""
    found: dict[int, _Loads] = {}
    firsts: dict[int, _Loads] = {}
    for like in plan.alike:
        stage = like.first.pipeline
        if stage not in firsts:
            firsts[stage] = {block.name: listed for block in like.first.blocks if (listed := _loaded(block))}
        if firsts[stage]:
            named = {block.name: name for name, block in like.blocks.items()}
            found[like.role.pipeline] = {named[block]: listed for block, listed in firsts[stage].items()}
    return found


def _loaded(block: Block) -> list[tuple[int, str, str]]:
    """Tokens and labels that a block loads: where, which, and for which of its micro-batches. No layer is in that."""
    return [
        (index, str(i.attribute("what")), i.writes[0].partition(":")[2])
        for index, i in enumerate(text(block.instructions))
        if i.opcode == "load_batch" and i.attribute("what") in _KINDS
    ]


def _somewhere(plan: Plan, what: str) -> tuple[int, str, int, str]:
    """Place of the first load of a kind."""
    for role in plan.roles:
        for block in role.blocks:
            for index, i in enumerate(block.instructions):
                if i.opcode == "load_batch" and i.attribute("what") == what:
                    return role.pipeline, block.name, index, shown(i)
    return -1, "", -1, ""


def _readers(plan: Plan) -> dict[str, tuple[tuple[str, str, str], ...]]:
    """Per segment with data inputs: (operator, name of its operand, input of the segment)."""
    found = {}
    for segment in plan.segments:
        rows = tuple(
            (call.operator, name, operand)
            for call in segment.body
            for name, operand in zip(call.row.operands, call.operands, strict=True)
            if operand in segment.inputs
        )
        if any(name in (*_READ, "count") for _, name, _ in rows):
            found[segment.name] = rows
    return found


@dataclass(frozen=True)
class _Use:
    """An input of an operator that reads data, as an instruction binds it."""

    operator: str
    operand: str
    register: str
    block: Block
    index: int


def _uses(plan: Plan, role: Role, readers: dict[str, tuple[tuple[str, str, str], ...]]) -> list[_Use]:
    found = []
    for block in role.blocks:
        for index, instruction in enumerate(block.instructions):
            if instruction.opcode not in ("forward", "recompute"):
                continue
            name = parse_unit(instruction.unit)[0]
            if name not in readers:
                continue
            registers = dict(zip(plan.segment_table[name].inputs, map(bare, instruction.reads)))
            found += [
                _Use(operator, operand, registers.get(formal, formal), block, index)
                for operator, operand, formal in readers[name]
            ]
    return found


def _used(role: Role, uses: list[_Use]) -> list[Finding]:
    """Operators read tokens as tokens and labels as labels."""
    found = []
    for order in ("train", "evaluate"):
        blocks = used_blocks(role, order)
        sources = {
            bare(i.writes[0]): str(i.attribute("what"))
            for block in blocks
            for i in block.instructions
            if i.opcode == "load_batch" and i.attribute("what") in _READ
        }
        names = {block.name for block in blocks}
        for use in uses:
            given = sources.get(use.register)
            if use.block.name in names and (use.operand in _READ or given) and given != use.operand:
                message = f"{use.operator} reads {given or use.register} as its {use.operand}"
                found.append(at("T751", message, role, use.block, use.index))
    return found


def _count(plan: Plan, role: Role, uses: list[_Use]) -> list[Finding]:
    """The loss is divided by the number of labels of the whole step: counted once, summed over data and context."""
    names = {use.register for use in uses if use.operand == "count"}
    if not names:
        return []
    labels = plan.types.get("labels")
    wanted = sorted(f for f, s in (labels.layout if labels else ()) if s.startswith("V") and plan.mesh.size(f) > 1)
    found: list[Finding] = []
    for order in ("train", "evaluate"):
        step = Step(plan, role, order).collect()
        for name in names:
            path = list(_trace(step, name))
            sums = [event.instruction for event in path[:-1]]
            counted = bool(path) and path[-1].instruction.attribute("what") == "count"
            plain = all(i.opcode == "all_reduce" and i.attribute("op") == "sum" for i in sums)
            if not counted or not plain or sorted(f for i in sums for f in _factors(plan, i.group)) != wanted:
                message = f"`{name}` must be the count of labels summed over {wanted or 'no factor'}"
                step.fail("T752", message, path[0] if path else None)
        found += step.findings
    return found


def _roles(plan: Plan, likes: tuple[Like, ...]) -> list[Finding]:
    """What roles load, and what they do with it: a role that is like one that uses none of it uses none."""
    readers, used = _readers(plan), set[int]()
    found: list[Finding] = []
    for role, first in ((like.role, like.first.pipeline) for like in likes):
        if first == role.pipeline:
            found += _loads(plan, role)
        elif first not in used:
            continue
        uses = _uses(plan, role, readers)
        used |= {first} if uses else set()
        found += _used(role, uses) + _count(plan, role, uses)
    return found


def data(plan: Plan) -> list[Finding]:
    """Findings of proof (e)."""
    found: list[Finding] = []
    rows, count = plan.setting("train.micro_batch"), plan.setting("train.micro_batches")
    whole = plan.setting("train.global_batch")
    if rows * count * plan.mesh.size("data") != whole:
        message = (
            f"{rows} sequences x {count} micro-batches x {plan.mesh.size('data')} ranks are not the batch of {whole}"
        )
        found.append(Finding("T750", message))
    padding, unit = plan.setting("train.padding", 0), 2 * plan.mesh.size("context") * plan.mesh.size("tensor")
    if not 0 <= padding < unit:
        found.append(Finding("T750", f"a sequence is filled up with {padding} places, fewer than {unit} will do"))
    found += found_alike(plan, lambda likes: _roles(plan, likes))
    loads = _loading(plan)
    return found + _times(plan, "train", loads) + _times(plan, "evaluate", loads) + list(permutations(plan))
