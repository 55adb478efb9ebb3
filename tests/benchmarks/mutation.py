"""Ways to break a plan: one function per kind of mistake, giving every place where it can be made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.program import Block, Plan, Role

Instructions = tuple[Instruction, ...]
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
UNITS = ("forward", "recompute", "backward", "backward_input", "backward_weight")


@dataclass(frozen=True)
class Mutant:
    """One broken plan, made when asked for."""

    operator: str
    where: str
    make: Callable[[], Plan]


Operator = Callable[[Plan], Iterator[tuple[str, Callable[[], Plan]]]]
OPERATORS: dict[str, Operator] = {}


def operator(function: Operator) -> Operator:
    OPERATORS[function.__name__] = function
    return function


def mutants(plan: Plan, name: str) -> list[Mutant]:
    """All mutants that one operator makes of a plan."""
    return [Mutant(name, where, make) for where, make in OPERATORS[name](plan)]


def with_role(plan: Plan, role: Role) -> Plan:
    return replace(plan, roles=tuple(role if r.pipeline == role.pipeline else r for r in plan.roles))


def with_block(plan: Plan, role: Role, block: Block, listing: Instructions) -> Plan:
    blocks = tuple(replace(b, instructions=listing) if b.name == block.name else b for b in role.blocks)
    return with_role(plan, replace(role, blocks=blocks))


def sites(plan: Plan, *opcodes: str) -> Iterator[tuple[Role, Block, int, Instruction]]:
    for role in plan.roles:
        called = {call.block for _, calls in role.orders for call in calls}
        for block in role.blocks:
            if block.name in called:
                for index, instruction in enumerate(block.instructions):
                    if not opcodes or instruction.opcode in opcodes:
                        yield role, block, index, instruction


def edited(
    plan: Plan, opcodes: tuple[str, ...], change: Callable[[Plan, Role, Instruction], Iterator[Instruction]]
) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """Mutants that replace one instruction by another."""
    for role, block, index, instruction in sites(plan, *opcodes):
        for number, new in enumerate(change(plan, role, instruction)):
            if new == instruction:
                continue

            def make(role: Role = role, block: Block = block, index: int = index, new: Instruction = new) -> Plan:
                listing = block.instructions
                return with_block(plan, role, block, (*listing[:index], new, *listing[index + 1 :]))

            yield f"{role.pipeline}/{block.name}[{index}].{number}", make


def spliced(
    plan: Plan, opcodes: tuple[str, ...], change: Callable[[Instructions, int], Iterator[Instructions]]
) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """Mutants that change the list of a block around one instruction."""
    for role, block, index, _ in sites(plan, *opcodes):
        for number, listing in enumerate(change(block.instructions, index)):

            def make(role: Role = role, block: Block = block, listing: Instructions = listing) -> Plan:
                return with_block(plan, role, block, listing)

            yield f"{role.pipeline}/{block.name}[{index}].{number}", make


def _without(listing: Instructions, index: int) -> Iterator[Instructions]:
    yield listing[:index] + listing[index + 1 :]


def _twice(listing: Instructions, index: int) -> Iterator[Instructions]:
    yield (*listing[: index + 1], *listing[index:])


def _without_wait(listing: Instructions, index: int) -> Iterator[Instructions]:
    """The instruction and its wait, where that stands in the same block."""
    token = listing[index].writes[0]
    rest = (*listing[:index], *listing[index + 1 :])
    yield tuple(i for i in rest if i.opcode != "wait" or i.reads != (token,))


def _drop(name: str, *opcodes: str, wait: bool = False) -> None:
    def drop(plan: Plan) -> Iterator[tuple[str, Callable[[], Plan]]]:
        yield from spliced(plan, opcodes, _without_wait if wait else _without)

    drop.__name__ = name
    operator(drop)


def _repeat(name: str, *opcodes: str) -> None:
    def repeat(plan: Plan) -> Iterator[tuple[str, Callable[[], Plan]]]:
        yield from spliced(plan, opcodes, _twice)

    repeat.__name__ = name
    operator(repeat)


_drop("drop_send", "send")
_drop("drop_receive", "recv")
_drop("drop_wait", "wait")
_drop("drop_free", "free")
_drop("drop_load", "load_batch")
_drop("drop_loss", "loss")
_drop("drop_segment", *UNITS)
_drop("drop_gradient_sum", "reduce_grad", wait=True)
_drop("drop_zero_grad", "zero_grad")
_drop("drop_update", "optimizer_step")
_drop("drop_gather_of_parameters", "unshard")
_drop("drop_collective", *COLLECTIVES)
_drop("drop_report", "report")
_drop("drop_norm", "grad_norm")
_repeat("repeat_send", "send")
_repeat("repeat_free", "free")
_repeat("repeat_segment", *UNITS)
_repeat("repeat_update", "optimizer_step")
_repeat("repeat_loss", "loss")
_repeat("repeat_load", "load_batch")
_repeat("repeat_collective", *COLLECTIVES)


@operator
def repeat_gradient_sum(plan: Plan) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """The same sum again after its wait: every gradient is multiplied by the number of replicas."""

    def change(listing: Instructions, index: int) -> Iterator[Instructions]:
        token = listing[index].writes[0]
        for at, other in enumerate(listing):
            if other.opcode == "wait" and other.reads == (token,):
                yield (*listing[: at + 1], listing[index], listing[at], *listing[at + 1 :])

    yield from spliced(plan, ("reduce_grad",), change)


@operator
def bypass_collective(plan: Plan) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """Readers read the source instead of the result: a sum of equal shape is silently left out."""

    def change(listing: Instructions, index: int) -> Iterator[Instructions]:
        move = listing[index]
        if not move.reads or move.reads[0].startswith("b."):
            return
        result, source = move.writes[0].rstrip("?"), move.reads[0]
        rest = [
            i for n, i in enumerate(listing) if n != index and not (i.opcode == "wait" and i.reads == (move.writes[0],))
        ]
        kept = []
        for i in rest:
            if i.opcode == "free":
                names = tuple(n for n in i.reads if n != source)
                if not names:
                    continue
                i = replace(i, reads=names)
            kept.append(replace(i, reads=tuple(source if n == result else n for n in i.reads)))
        yield tuple(kept)

    yield from spliced(plan, COLLECTIVES, change)


@operator
def free_early(plan: Plan) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """A free goes before the instruction in front of it, and before the one before that."""

    def change(listing: Instructions, index: int) -> Iterator[Instructions]:
        for back in (1, 2, 3):
            if index >= back:
                at = index - back
                yield (*listing[:at], listing[index], *listing[at:index], *listing[index + 1 :])

    yield from spliced(plan, ("free",), change)


@operator
def free_another(plan: Plan) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """A register that is still used is freed instead."""

    def change(plan: Plan, role: Role, i: Instruction) -> Iterator[Instruction]:
        for name in i.reads:
            base, mark, symbol = name.partition(":")
            for other in ("x.l0", "x.l1", "h.l0", "labels"):
                if other != base and mark:
                    yield replace(i, reads=tuple(f"{other}:{symbol}" if n == name else n for n in i.reads))

    yield from edited(plan, ("free",), change)


@operator
def swap_neighbours(plan: Plan) -> Iterator[tuple[str, Callable[[], Plan]]]:
    def change(listing: Instructions, index: int) -> Iterator[Instructions]:
        if index + 1 < len(listing) and listing[index] != listing[index + 1]:
            yield (*listing[:index], listing[index + 1], listing[index], *listing[index + 2 :])

    yield from spliced(plan, (), change)


@operator
def swap_collectives(plan: Plan) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """One role issues two collectives, with their waits, the other way round."""

    def change(listing: Instructions, index: int) -> Iterator[Instructions]:
        later = [n for n in range(index + 1, len(listing)) if listing[n].opcode in (*COLLECTIVES, "reduce_grad")]
        if later:
            a, b = index, later[0]
            swapped = list(listing)
            swapped[a], swapped[b] = listing[b], listing[a]
            if (
                a + 1 < len(listing)
                and b + 1 < len(listing)
                and listing[a + 1].opcode == listing[b + 1].opcode == "wait"
            ):
                swapped[a + 1], swapped[b + 1] = listing[b + 1], listing[a + 1]
            yield tuple(swapped)

    yield from spliced(plan, (*COLLECTIVES, "reduce_grad"), change)


@operator
def wait_late(plan: Plan) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """A wait goes behind the instruction that needs it."""

    def change(listing: Instructions, index: int) -> Iterator[Instructions]:
        for on in (1, 2):
            if index + on < len(listing):
                yield (
                    *listing[:index],
                    *listing[index + 1 : index + on + 1],
                    listing[index],
                    *listing[index + on + 1 :],
                )

    yield from spliced(plan, ("wait",), change)


@operator
def wrong_group(plan: Plan) -> Iterator[tuple[str, Callable[[], Plan]]]:
    axes = [f for f, size in plan.mesh.factors if size > 1] + [g.name for g in plan.groups]

    def change(plan: Plan, role: Role, i: Instruction) -> Iterator[Instruction]:
        yield from (replace(i, group=axis) for axis in axes)

    yield from edited(plan, (*COLLECTIVES, "reduce_grad", "unshard"), change)
