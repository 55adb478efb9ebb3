"""Mutations of what instructions say: groups, attributes, operands and order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from titan.compiler.plan.instruction import Instruction, type_name
from titan.compiler.plan.program import BlockCall, Plan, Role

from tests.benchmarks.mutation import COLLECTIVES, UNITS, Instructions, edited, operator, sites, spliced, with_role


def _attribute(i: Instruction, key: str, value: int | str) -> Instruction:
    return replace(i, attributes=tuple((k, value if k == key else v) for k, v in i.attributes))


@operator
def wrong_reduction(plan: Plan) -> Iterator[tuple[str, Callable[[], Plan]]]:
    def change(plan: Plan, role: Role, i: Instruction) -> Iterator[Instruction]:
        yield _attribute(i, "op", "sum" if i.attribute("op") == "max" else "max")

    yield from edited(plan, ("all_reduce",), change)


@operator
def wrong_dim(plan: Plan) -> Iterator[tuple[str, Callable[[], Plan]]]:
    def change(plan: Plan, role: Role, i: Instruction) -> Iterator[Instruction]:
        for key, value in i.attributes:
            if key in ("dim", "split", "concat"):
                yield from (_attribute(i, key, dim) for dim in range(3) if dim != value)

    yield from edited(plan, COLLECTIVES, change)


@operator
def wrong_mode(plan: Plan) -> Iterator[tuple[str, Callable[[], Plan]]]:
    def change(plan: Plan, role: Role, i: Instruction) -> Iterator[Instruction]:
        for mode in ("all_reduce", "reduce_scatter"):
            yield replace(i, attributes=(("mode", mode),))
        for group in ("data", "context", "tensor"):
            yield replace(i, attributes=(("mode", "all_reduce_shard"), ("shard", group)))

    yield from edited(plan, ("reduce_grad",), change)


@operator
def wrong_root(plan: Plan) -> Iterator[tuple[str, Callable[[], Plan]]]:
    def change(plan: Plan, role: Role, i: Instruction) -> Iterator[Instruction]:
        yield from (_attribute(i, "root", stage) for stage in range(len(plan.roles)))

    yield from edited(plan, ("broadcast",), change)


@operator
def wrong_peer(plan: Plan) -> Iterator[tuple[str, Callable[[], Plan]]]:
    def change(plan: Plan, role: Role, i: Instruction) -> Iterator[Instruction]:
        yield from (_attribute(i, "peer", peer) for peer in (-2, -1, 1, 2))

    yield from edited(plan, ("send", "recv"), change)


@operator
def wrong_stream(plan: Plan) -> Iterator[tuple[str, Callable[[], Plan]]]:
    def change(plan: Plan, role: Role, i: Instruction) -> Iterator[Instruction]:
        yield replace(i, stream="act" if i.stream == "grad" else "grad")

    yield from edited(plan, ("send", "recv"), change)


@operator
def wrong_kind_of_collective(plan: Plan) -> Iterator[tuple[str, Callable[[], Plan]]]:
    def change(plan: Plan, role: Role, i: Instruction) -> Iterator[Instruction]:
        for opcode, attributes in (
            ("all_gather", (("dim", 1),)),
            ("reduce_scatter", (("dim", 1),)),
            ("all_reduce", (("op", "sum"),)),
        ):
            if opcode != i.opcode:
                yield replace(i, opcode=opcode, attributes=attributes)

    yield from edited(plan, COLLECTIVES, change)


def _exchanged(i: Instruction, a: int, b: int) -> Instruction:
    reads = list(i.reads)
    reads[a], reads[b] = reads[b], reads[a]
    return replace(i, reads=tuple(reads))


@operator
def swap_operands(plan: Plan) -> Iterator[tuple[str, Callable[[], Plan]]]:
    def change(plan: Plan, role: Role, i: Instruction) -> Iterator[Instruction]:
        for a in range(len(i.reads)):
            for b in range(a + 1, len(i.reads)):
                yield _exchanged(i, a, b)

    yield from edited(plan, UNITS, change)


@operator
def wrong_register(plan: Plan) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """Another register of the same type is read."""
    names = sorted(
        {n for _, _, _, i in sites(plan) for n in i.writes if not n.endswith("?") and type_name(n) in plan.types}
    )

    def change(plan: Plan, role: Role, i: Instruction) -> Iterator[Instruction]:
        for place, name in enumerate(i.reads):
            tensor = plan.types.get(type_name(name))
            if tensor is None or name.endswith("?"):
                continue
            for other in names:
                same = plan.types[type_name(other)]
                if other != name and (same.dtype, same.shape) == (tensor.dtype, tensor.shape):
                    yield replace(i, reads=(*i.reads[:place], other, *i.reads[place + 1 :]))

    yield from edited(plan, (*UNITS, *COLLECTIVES, "send", "add"), change)


@operator
def wrong_layer(plan: Plan) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """A segment is bound to another layer's parameters."""

    def change(plan: Plan, role: Role, i: Instruction) -> Iterator[Instruction]:
        name, mark, layer = i.unit.rpartition(".l")
        if mark and layer.isdigit():
            yield from (replace(i, unit=f"{name}.l{other}") for other in (int(layer) + 1, int(layer) - 1) if other >= 0)

    yield from edited(plan, UNITS, change)


@operator
def wrong_segment(plan: Plan) -> Iterator[tuple[str, Callable[[], Plan]]]:
    def change(plan: Plan, role: Role, i: Instruction) -> Iterator[Instruction]:
        name, mark, layer = i.unit.rpartition(".l")
        for segment in plan.segments:
            if segment.name != (name or layer):
                yield replace(i, unit=segment.name + mark + layer if mark else segment.name)

    yield from edited(plan, UNITS, change)


@operator
def wrong_bucket(plan: Plan) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """Another bucket is read or updated."""

    def change(plan: Plan, role: Role, i: Instruction) -> Iterator[Instruction]:
        for field in ("reads", "updates"):
            names = getattr(i, field)
            for place, name in enumerate(names):
                for buffer in role.buffers:
                    if buffer.name[:2] == name[:2] and buffer.name != name and name[:2] in ("p.", "g.", "o."):
                        yield replace(i, **{field: (*names[:place], buffer.name, *names[place + 1 :])})

    yield from edited(plan, (), change)


@operator
def no_weight_gradient(plan: Plan) -> Iterator[tuple[str, Callable[[], Plan]]]:
    def change(plan: Plan, role: Role, i: Instruction) -> Iterator[Instruction]:
        if i.updates:
            yield replace(i, updates=())

    yield from edited(plan, UNITS, change)


@operator
def drop_carry(plan: Plan) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """The gradient of a value read twice loses one of its parts."""

    def change(plan: Plan, role: Role, i: Instruction) -> Iterator[Instruction]:
        if i.attribute("carry"):
            outputs = sum(1 for n in i.reads if n.startswith("d.")) - len(str(i.attribute("carry")).split(","))
            reads = tuple(n for place, n in enumerate(i.reads) if not (n.startswith("d.") and place >= outputs))
            yield replace(i, attributes=(), reads=reads)

    yield from edited(plan, ("backward", "backward_input"), change)


@operator
def add_with_itself(plan: Plan) -> Iterator[tuple[str, Callable[[], Plan]]]:
    def change(plan: Plan, role: Role, i: Instruction) -> Iterator[Instruction]:
        yield replace(i, reads=(i.reads[0], i.reads[0]))
        yield replace(i, reads=(i.reads[1], i.reads[1]))

    yield from edited(plan, ("add",), change)


@operator
def norm_misses_a_bucket(plan: Plan) -> Iterator[tuple[str, Callable[[], Plan]]]:
    def change(plan: Plan, role: Role, i: Instruction) -> Iterator[Instruction]:
        for place in range(len(i.reads)):
            if len(i.reads) > 1:
                yield replace(i, reads=i.reads[:place] + i.reads[place + 1 :])

    yield from edited(plan, ("grad_norm",), change)


@operator
def norm_counts_twice(plan: Plan) -> Iterator[tuple[str, Callable[[], Plan]]]:
    def change(plan: Plan, role: Role, i: Instruction) -> Iterator[Instruction]:
        yield from (replace(i, reads=(*i.reads, name)) for name in i.reads)

    yield from edited(plan, ("grad_norm",), change)


@operator
def update_by_local_norm(plan: Plan) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """The clip factor comes from the rank's own part of the norm."""

    def change(listing: Instructions, index: int) -> Iterator[Instructions]:
        if not any(i.reads[:1] == ("nsq.local",) for i in listing if i.opcode == "all_reduce"):
            return
        report = Instruction("report", reads=("nsq.local",), attributes=(("name", "grad_norm"),))
        yield tuple(report if i.opcode == "report" else i for i in listing if i.opcode != "free") + tuple(
            i for i in listing if i.opcode == "free"
        )

    yield from spliced(plan, ("grad_norm",), change)


@operator
def wrong_load(plan: Plan) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """Another piece of the sequence, another micro-batch or labels instead of tokens."""

    def change(plan: Plan, role: Role, i: Instruction) -> Iterator[Instruction]:
        given = dict(i.attributes)
        for key, values in (
            ("what", ("tokens", "labels", "count")),
            ("start", (0, "@tensor*4", "@context*2", "@data*4", 4)),
            ("micro_batch", (0, 1)),
            ("length", (2, 4, 8)),
        ):
            if key in given:
                yield from (_attribute(i, key, value) for value in values if value != given[key])

    yield from edited(plan, ("load_batch",), change)


@operator
def other_micro_batch(plan: Plan) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """One register of an instruction is that of micro-batch 0, or has no micro-batch."""

    def change(plan: Plan, role: Role, i: Instruction) -> Iterator[Instruction]:
        for place, name in enumerate(i.reads):
            if ":" in name and i.opcode not in ("free", "wait"):
                yield replace(i, reads=(*i.reads[:place], name.partition(":")[0], *i.reads[place + 1 :]))

    yield from edited(plan, (), change)


@operator
def eager_wait_for_sends(plan: Plan) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """Every role waits for each send at once: exchanges that cross complete only if the network buffers."""
    if len(plan.roles) < 2:
        return
    for stream in ("act", "grad"):

        def make(stream: str = stream) -> Plan:
            found = plan
            for role in plan.roles:
                blocks = tuple(replace(b, instructions=_eager(b.instructions, stream)) for b in role.blocks)
                found = with_role(found, replace(role, blocks=blocks))
            return found

        yield stream, make


@operator
def exchanges_that_need_buffers(plan: Plan) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """Receives are posted only when their value is needed, and every send is waited for at once."""
    if len(plan.roles) < 2:
        return

    def make() -> Plan:
        found = plan
        for role in plan.roles:
            blocks = tuple(replace(b, instructions=_eager(_eager(b.instructions, "act"), "grad")) for b in role.blocks)
            orders = tuple((name, _late_receives(role, calls)) for name, calls in role.orders)
            found = with_role(found, replace(role, blocks=blocks, orders=orders))
        return found

    yield "all", make


def _late_receives(role: Role, calls: tuple[BlockCall, ...]) -> tuple[BlockCall, ...]:
    """Every call that posts a receive goes right before the call that waits for it."""
    waits = {(i.reads[0], b.name) for b in role.blocks for i in b.instructions if i.opcode == "wait"}
    posts = {b.name: i.writes[0] for b in role.blocks for i in b.instructions if i.opcode == "recv"}
    held = [call for call in calls if call.block in posts]
    found: list[BlockCall] = []
    for call in calls:
        if call.block in posts:
            continue
        found += [r for r in held if r.arguments == call.arguments and (posts[r.block], call.block) in waits]
        found.append(call)
    return tuple(found)


def _eager(listing: Instructions, stream: str) -> Instructions:
    found: list[Instruction] = []
    own = {i.writes[0] for i in listing if i.opcode == "send"}
    for i in listing:
        if i.opcode == "wait" and i.reads[0].startswith("t.") and i.reads[0] not in own:
            grad = i.reads[0].startswith("t.d.")
            if grad == (stream == "grad"):
                continue
        found.append(i)
        if i.opcode == "send" and i.stream == stream:
            found.append(Instruction("wait", (), (i.writes[0],)))
    return tuple(found)
