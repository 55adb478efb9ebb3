"""Mistakes in the order of a program and in the plan's header."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from titan.compiler.plan.operators import Attribute, TensorType
from titan.compiler.plan.program import BlockCall, Bucket, Parameter, Plan, Role
from titan.compiler.plan.segment import Call, Segment

from tests.benchmarks.mutation import operator, with_role

Made = Iterator[tuple[str, Callable[[], Plan]]]
Calls = tuple[BlockCall, ...]


def _ordered(plan: Plan, change: Callable[[Calls, int], Iterator[Calls]]) -> Made:
    for role in plan.roles:
        for name, calls in role.orders:
            for position in range(len(calls)):
                for number, new in enumerate(change(calls, position)):
                    if new == calls:
                        continue

                    def make(role: Role = role, name: str = name, new: Calls = new) -> Plan:
                        orders = tuple((n, new if n == name else c) for n, c in role.orders)
                        return with_role(plan, replace(role, orders=orders))

                    yield f"{role.pipeline}/{name}[{position}].{number}", make


@operator
def drop_call(plan: Plan) -> Made:
    def change(calls: Calls, at: int) -> Iterator[Calls]:
        yield calls[:at] + calls[at + 1 :]

    yield from _ordered(plan, change)


@operator
def repeat_call(plan: Plan) -> Made:
    def change(calls: Calls, at: int) -> Iterator[Calls]:
        yield calls[: at + 1] + calls[at:]

    yield from _ordered(plan, change)


@operator
def swap_calls(plan: Plan) -> Made:
    def change(calls: Calls, at: int) -> Iterator[Calls]:
        for distance in (1, 2, 3):
            if at + distance < len(calls):
                swapped = list(calls)
                swapped[at], swapped[at + distance] = calls[at + distance], calls[at]
                yield tuple(swapped)

    yield from _ordered(plan, change)


@operator
def move_call_to_the_end(plan: Plan) -> Made:
    def change(calls: Calls, at: int) -> Iterator[Calls]:
        yield (*calls[:at], *calls[at + 1 :], calls[at])
        yield (calls[at], *calls[:at], *calls[at + 1 :])

    yield from _ordered(plan, change)


@operator
def read_micro_batch_twice(plan: Plan) -> Made:
    """A call runs another micro-batch's number."""

    def change(calls: Calls, at: int) -> Iterator[Calls]:
        call = calls[at]
        if call.arguments:
            for other in range(3):
                yield (*calls[:at], call._replace(arguments=(other, *call.arguments[1:])), *calls[at + 1 :])

    yield from _ordered(plan, change)


@operator
def exchange_micro_batches(plan: Plan) -> Made:
    """Every call of one micro-batch in one role runs another, and the other way round."""
    for role in plan.roles:
        for name, calls in role.orders:

            def make(role: Role = role, name: str = name, calls: Calls = calls) -> Plan:
                turn = {0: 1, 1: 0}
                new = tuple(c._replace(arguments=tuple(turn.get(a, a) for a in c.arguments)) for c in calls)
                return with_role(
                    plan, replace(role, orders=tuple((n, new if n == name else c) for n, c in role.orders))
                )

            yield f"{role.pipeline}/{name}", make


@operator
def wrong_block(plan: Plan) -> Made:
    """A call runs another block with as many parameters."""
    for role in plan.roles:
        arity = {b.name: len(b.parameters) for b in role.blocks}

        def change(calls: Calls, at: int, arity: dict[str, int] = arity) -> Iterator[Calls]:
            for other, count in arity.items():
                if count == len(calls[at].arguments) and other != calls[at].block:
                    yield (*calls[:at], calls[at]._replace(block=other), *calls[at + 1 :])

        single = replace(plan, roles=(role,))
        for where, make in _ordered(single, change):

            def whole(role: Role = role, make: Callable[[], Plan] = make) -> Plan:
                return with_role(plan, make().roles[0])

            yield where, whole


def _typed(plan: Plan, change: Callable[[TensorType], Iterator[TensorType]]) -> Made:
    for place, (name, tensor) in enumerate(plan.tensors):
        for number, new in enumerate(change(tensor)):

            def make(place: int = place, name: str = name, new: TensorType = new) -> Plan:
                return replace(plan, tensors=(*plan.tensors[:place], (name, new), *plan.tensors[place + 1 :]))

            yield f"tensor {name}.{number}", make


@operator
def wrong_dtype(plan: Plan) -> Made:
    def change(tensor: TensorType) -> Iterator[TensorType]:
        yield from (replace(tensor, dtype=dtype) for dtype in ("f32", "bf16", "i64") if dtype != tensor.dtype)

    yield from _typed(plan, change)


@operator
def wrong_shape(plan: Plan) -> Made:
    def change(tensor: TensorType) -> Iterator[TensorType]:
        for dim, size in enumerate(tensor.shape):
            yield replace(tensor, shape=(*tensor.shape[:dim], size * 2, *tensor.shape[dim + 1 :]))

    yield from _typed(plan, change)


@operator
def wrong_layout(plan: Plan) -> Made:
    def change(tensor: TensorType) -> Iterator[TensorType]:
        for place, (factor, state) in enumerate(tensor.layout):
            for other in ("R", "P", "V0", "V1"):
                if other != state:
                    yield replace(tensor, layout=(*tensor.layout[:place], (factor, other), *tensor.layout[place + 1 :]))

    yield from _typed(plan, change)


def _bucketed(plan: Plan, change: Callable[[Bucket], Iterator[Bucket]]) -> Made:
    for place, bucket in enumerate(plan.buckets):
        for number, new in enumerate(change(bucket)):
            if new == bucket:
                continue

            def make(place: int = place, new: Bucket = new) -> Plan:
                return replace(plan, buckets=(*plan.buckets[:place], new, *plan.buckets[place + 1 :]))

            yield f"bucket {bucket.name}.{number}", make


@operator
def wrong_bucket_header(plan: Plan) -> Made:
    stages = len(plan.roles)

    def change(bucket: Bucket) -> Iterator[Bucket]:
        yield replace(bucket, sums=())
        yield replace(bucket, sums=("tensor",))
        yield replace(bucket, uncounted="")
        yield replace(bucket, uncounted="tensor")
        yield replace(bucket, uncounted="data")
        yield replace(bucket, sharded=not bucket.sharded)
        yield replace(bucket, replicas="")
        yield replace(bucket, replicas="tensor")
        yield replace(bucket, homes=bucket.homes[:1])
        yield replace(bucket, homes=tuple(range(stages)))
        yield replace(bucket, homes=bucket.homes[::-1])

    yield from _bucketed(plan, change)


@operator
def wrong_parameter_header(plan: Plan) -> Made:
    for place, parameter in enumerate(plan.parameters):
        tensor = parameter.tensor
        changed = [
            replace(parameter, offset=parameter.offset + 1),
            replace(parameter, offset=max(0, parameter.offset - 1)),
            replace(parameter, shape=(parameter.shape[0] * 2, *parameter.shape[1:])),
            replace(parameter, tensor=replace(tensor, layout=())),
            replace(parameter, tensor=replace(tensor, layout=(("tensor", "V0"),))),
        ]
        for number, new in enumerate(changed):
            if new == parameter:
                continue

            def make(place: int = place, new: Parameter = new) -> Plan:
                return replace(plan, parameters=(*plan.parameters[:place], new, *plan.parameters[place + 1 :]))

            yield f"parameter {parameter.name}.{number}", make


def _bodies(plan: Plan, change: Callable[[Segment, Call], Iterator[Call]]) -> Made:
    for place, segment in enumerate(plan.segments):
        for at, call in enumerate(segment.body):
            for number, new in enumerate(change(segment, call)):
                if new == call:
                    continue

                def make(place: int = place, segment: Segment = segment, at: int = at, new: Call = new) -> Plan:
                    body = (*segment.body[:at], new, *segment.body[at + 1 :])
                    changed = replace(segment, body=body)
                    return replace(plan, segments=(*plan.segments[:place], changed, *plan.segments[place + 1 :]))

                yield f"segment {segment.name}[{at}].{number}", make


@operator
def wrong_start(plan: Plan) -> Made:
    """An operator believes its piece to begin elsewhere."""

    def change(segment: Segment, call: Call) -> Iterator[Call]:
        values: tuple[Attribute, ...] = (0, 4, "@tensor*4", "@context*4", "@data*4")
        for key, value in call.attributes:
            if key == "start":
                for other in values:
                    if other != value:
                        yield replace(call, attributes=tuple((k, other if k == key else v) for k, v in call.attributes))

    yield from _bodies(plan, change)


@operator
def wrong_body_operand(plan: Plan) -> Made:
    """An operator of a segment reads another value of the same shape but another layout or kind."""

    def change(segment: Segment, call: Call) -> Iterator[Call]:
        for place, operand in enumerate(call.operands):
            for other, tensor in segment.values:
                mine = segment.types[operand]
                if other != operand and (tensor.shape != mine.shape or tensor.layout != mine.layout):
                    yield replace(call, operands=(*call.operands[:place], other, *call.operands[place + 1 :]))

    yield from _bodies(plan, change)


@operator
def wrong_declared_value(plan: Plan) -> Made:
    """A value of a segment is declared with another layout."""
    for place, segment in enumerate(plan.segments):
        for at, (name, tensor) in enumerate(segment.values):
            for number, (factor, state) in enumerate(tensor.layout):
                for other in ("R", "P", "V0"):
                    if other == state:
                        continue
                    layout = (*tensor.layout[:number], (factor, other), *tensor.layout[number + 1 :])

                    def make(
                        place: int = place,
                        segment: Segment = segment,
                        at: int = at,
                        value: tuple[str, TensorType] = (name, replace(tensor, layout=layout)),
                    ) -> Plan:
                        values = (*segment.values[:at], value, *segment.values[at + 1 :])
                        changed = replace(segment, values=values)
                        return replace(plan, segments=(*plan.segments[:place], changed, *plan.segments[place + 1 :]))

                    yield f"segment {segment.name} {name}.{number}{other}", make


@operator
def wrong_setting(plan: Plan) -> Made:
    """The batch is not what the programs read."""
    for key in ("train.global_batch", "train.micro_batches", "train.micro_batch", "train.sequence"):

        def make(key: str = key) -> Plan:
            return replace(plan, settings=tuple((k, str(int(v) * 2) if k == key else v) for k, v in plan.settings))

        yield key, make


@operator
def wrong_tied_group(plan: Plan) -> Made:
    """A declared group joins other stages."""
    for place, group in enumerate(plan.groups):
        for pipeline in ((0,), (0, 1), (), (1, 0)):
            if pipeline == group.pipeline or (pipeline and max(pipeline) >= len(plan.roles)):
                continue

            def make(place: int = place, pipeline: tuple[int, ...] = pipeline) -> Plan:
                changed = replace(plan.groups[place], pipeline=pipeline)
                return replace(plan, groups=(*plan.groups[:place], changed, *plan.groups[place + 1 :]))

            yield f"group {group.name} {pipeline}", make
