"""`titan inspect`: a plan's header in short, one rank's whole list with names resolved, and where the memory goes.

All functions give lines as they are wanted, so that a reader that stops early costs nothing more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import prod

from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.mesh import evaluate
from titan.compiler.plan.operators import Attribute
from titan.compiler.plan.program import Plan, Role
from titan.compiler.plan.sizes import Sizes, liveness, memory_by_component
from titan.compiler.plan.text import instruction_text
from titan.grammar.diagnostics import Diagnostic, TitanError

COLUMN = 96  # where the remark of a line begins, when there is room


def header_lines(plan: Plan) -> Iterator[str]:
    """What the plan is: model, mesh, training, groups, buckets, one line per role."""
    from titan.compiler.plan.file import plan_hash

    model = plan.setting("model", {})
    yield f"titan plan {plan.version}   sha256 {plan_hash(plan)}   made by titan {plan.setting('titan', '?')}"
    elements = sum(prod(parameter.shape) for parameter in plan.parameters)
    yield f"model        {model.get('name', '?')}, {elements:,} parameters with padding"
    yield f"mesh         {_mesh(plan)} = {plan.mesh.world_size:,} ranks"
    yield f"training     {_training(plan)}"
    for group in plan.groups:
        restricted = f" of pipeline {', '.join(map(str, group.pipeline))}" if group.pipeline else ""
        yield f"group        {group.name} = {group.axes}{restricted}, {plan.group_size(group.name):,} ranks"
    sharded = sum(bool(bucket.sharded) for bucket in plan.buckets)
    total = sum(bucket.elements for bucket in plan.buckets)
    yield f"buckets      {len(plan.buckets)}, {sharded} of them with a sharded optimizer, {total:,} local elements"
    yield f"segments     {', '.join(s.name for s in plan.segments)}"
    for role in plan.roles:
        yield _role_line(plan, role)


def _mesh(plan: Plan) -> str:
    return " x ".join(f"{name} {size}" for name, size in plan.mesh.factors if size > 1) or "one rank"


def _training(plan: Plan) -> str:
    get = plan.setting
    return (
        f"{get('train.precision')}, sequence {get('train.sequence')}, global batch {get('train.global_batch')} = "
        f"micro-batch {get('train.micro_batch')} x {get('train.micro_batches')} x data {plan.mesh.size('data')}"
    )


def _role_line(plan: Plan, role: Role) -> str:
    count = plan.mesh.world_size // len(plan.roles)
    calls = Counter(role.called("train"))
    length = sum(len(block.instructions) * calls[block.name] for block in role.blocks)
    layers = "; ".join(_ranges(chunk) or "none" for chunk in role.layers)
    size = f"{len(role.blocks)} blocks, {length:,} instructions a step"
    return f"role {role.pipeline:<7} {count:,} ranks, layers {layers}, {size}"


def text_lines(plan: Plan) -> Iterator[str]:
    """The plan's text, as it is stored."""
    from titan.compiler.plan.text import print_plan

    yield from print_plan(plan).splitlines()


def check_rank(plan: Plan, rank: int, order: str) -> None:
    """Raises T606 for a rank or an order that the plan does not have."""
    size = plan.mesh.world_size
    if not 0 <= rank < size:
        near = (f"0 to {size - 1}",)
        raise TitanError(Diagnostic("T606", f"rank {rank} is not in the plan, which has {size} ranks", nearest=near))
    orders = tuple(name for name, _ in plan.role_of(rank).orders)
    if order not in orders:
        raise TitanError(Diagnostic("T606", f"the plan has no order `{order}`", nearest=orders))


def rank_lines(plan: Plan, rank: int, order: str = "train") -> Iterator[str]:
    """The concrete list of one rank: number, instruction with coordinates evaluated, and after `#` who takes part."""
    check_rank(plan, rank, order)
    return _rank_lines(plan, rank, order)


def _rank_lines(plan: Plan, rank: int, order: str) -> Iterator[str]:
    coordinates = plan.mesh.coordinates(rank)
    role = plan.role_of(rank)
    yield f"# rank {rank} of {plan.mesh.world_size}: " + " ".join(f"{name}={c}" for name, c in coordinates.items())
    remarks: dict[tuple[str, str, Attribute], str] = {}
    placed = (tuple(_placed(i, plan, coordinates) for i in block.instructions) for block in role.blocks)
    blocks = tuple(replace(block, instructions=instructions) for block, instructions in zip(role.blocks, placed))
    local = replace(role, blocks=blocks)
    last = -1
    for number, (position, _, call, instruction) in enumerate(local.instructions(order)):
        if position != last:
            yield f"# {call}"
            last = position
        line = f"{number:6}  {instruction_text(instruction)}"
        if not instruction.group:
            yield line
            continue
        key = (instruction.opcode, instruction.group, instruction.attribute("peer"))
        if key not in remarks:
            remarks[key] = _participants(plan, rank, instruction)
        yield f"{line:<{COLUMN}} # {remarks[key]}"


def _placed(instruction: Instruction, plan: Plan, coordinates: dict[str, int]) -> Instruction:
    """With coordinate expressions replaced by their values on this rank."""
    if not any(isinstance(value, str) and value.startswith("@") for _, value in instruction.attributes):
        return instruction
    attributes = tuple((key, evaluate(value, plan.mesh, coordinates)) for key, value in instruction.attributes)
    return replace(instruction, attributes=attributes)


def _participants(plan: Plan, rank: int, instruction: Instruction) -> str:
    if instruction.opcode in ("send", "recv"):
        peer = plan.mesh.peer(rank, instruction.group, int(instruction.attribute("peer")))
        return f"{'to' if instruction.opcode == 'send' else 'from'} rank {peer}"
    members = plan.group_members(rank, instruction.group)
    if instruction.opcode == "broadcast":
        return f"from rank {members[int(instruction.attribute('root'))]} among {_ranges(members)}"
    return f"ranks {_ranges(members)}"


def _ranges(numbers: tuple[int, ...]) -> str:
    """`0-7`, `0-56/8` (every eighth), or `0,1,5`; short for any regular group."""
    if len(numbers) < 3:
        return ",".join(map(str, numbers))
    step = numbers[1] - numbers[0]
    if all(b - a == step for a, b in pairwise(numbers)):
        return f"{numbers[0]}-{numbers[-1]}" + (f"/{step}" if step != 1 else "")
    runs: list[list[int]] = [[numbers[0]]]
    for number in numbers[1:]:
        runs[-1].append(number) if number == runs[-1][-1] + 1 else runs.append([number])
    text = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    return ",".join(text[:8]) + (f",... {len(numbers)} in all" if len(text) > 8 else "")


def memory_lines(plan: Plan, order: str = "train") -> Iterator[str]:
    """Bytes of each role by component, and the instruction at which registers and workspace are highest."""
    check_rank(plan, 0, order)
    return _memory_lines(plan, order)


def _memory_lines(plan: Plan, order: str) -> Iterator[str]:
    sizes = Sizes(plan)
    limit = int(plan.setting("memory.limit_bytes", 0))
    for role in plan.roles:
        parts = memory_by_component(plan, role, sizes)
        total = sum(parts.values())
        share = f", {total / limit:.1%} of the limit of {limit:,}" if limit else ""
        yield f"role {role.pipeline}   {total:,} bytes{share}"
        for name, size in parts.items():
            yield f"   {name:<12} {size:>20,}  {size / total if total else 0:6.1%}"
        walk = liveness(plan, role, order, sizes)
        if walk.place[0] >= 0:
            call = role.order(order)[walk.place[0]]
            instruction = role.block_table[call.block].instructions[walk.place[1]]
            yield f"   highest of `{order}` in {call}, instruction {walk.place[1]}: {instruction_text(instruction)}"
