"""The plan: what is verified, priced, drawn and executed. Immutable; nothing in it that cannot be printed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import cached_property
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from titan.compiler.plan.alike import Like, alike
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.instruction import Instruction, base_name, unroll
from titan.compiler.plan.listing import Stretch, stretches, text
from titan.compiler.plan.mesh import Group, Mesh
from titan.compiler.plan.operators import DTYPE_BYTES, TensorType
from titan.compiler.plan.segment import Segment
from titan.compiler.plan.threads import Threads, legs, threads

_OPCODE, _BLOCK = attrgetter("opcode"), itemgetter(0)
BEGUN = ".begun"  # ends the names of blocks of order `check` that run before the next step's body


@dataclass(frozen=True, slots=True)
class Parameter:
    """A trainable tensor. `tensor` is its padded global shape's *local* piece on one rank (shape after sharding, dtype,
    layout); `shape` the global shape with padding; `rows` the true number of rows of dim 0 (padding rows stay zero)."""

    name: str
    shape: tuple[int, ...]
    rows: int
    tensor: TensorType
    bucket: str
    offset: int  # in elements, inside the bucket
    decay: bool
    initializer: str  # "normal:0.02", "ones", "zeros", "power_of_two"


@dataclass(frozen=True, slots=True)
class Bucket:
    """A flat padded buffer of parameters that are reduced and updated together.

    elements    whole length, padded to a multiple of the shard group's size
    dtype       of the parameters; gradients and optimizer state are float32 (float64 in a float64 run)
    sums        groups over which gradients are partial beside `replicas` (tensor factors)
    replicas    group whose ranks see different data (data*context)
    shards      group over which buffers are sharded: `replicas`, or its inner factors (HSDP), or both with all homes
                (then each shard counts in the norm where it is); empty: nothing is
    sharded     kinds of buffers of which a rank holds only its shard: `o` (ZeRO-1), `g` (2), `p` (3)
    uncounted   group whose ranks hold equal gradients after the sums: only coordinate 0 counts in the norm
    homes       pipeline coordinates that hold a copy (tied weights: two; the first counts in the norm)
    """

    name: str
    elements: int
    dtype: str
    sums: tuple[str, ...]
    replicas: str
    shards: str
    sharded: tuple[str, ...]
    uncounted: str
    homes: tuple[int, ...]

    def local(self, kind: str, degree: int) -> int:
        """Elements of the buffer `kind` (p, g or o) on one rank, one copy; `degree` is the size of `shards`."""
        return self.elements // degree if kind in self.sharded else self.elements

    @property
    def state_copies(self) -> int:
        """AdamW keeps two moments, and a master copy of parameters that are narrower than the state."""
        return 2 if DTYPE_BYTES[self.dtype] >= 4 else 3


@dataclass(frozen=True, slots=True)
class Buffer:
    """Storage of a role that lives for ever: `kind` is parameters, gradients, optimizer, kept or metric; `place` is
    `device` or `host`."""

    name: str
    kind: str
    dtype: str
    elements: int
    place: str = "device"

    @property
    def bytes(self) -> int:
        return self.elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Block:
    """The instruction list of one order element, with micro-batches as parameters (`i`, and `j` of a pair). What equal
    layers repeat may be written once (`compiler/plan/listing.py`)."""

    name: str
    parameters: tuple[str, ...]
    instructions: Sequence[Instruction]


class BlockCall(NamedTuple):
    """A block with its micro-batches: `F.c0(3)`. A tuple, for an order has tens of thousands."""

    block: str
    arguments: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.block}({','.join(map(str, self.arguments))})"


def _written(tree: Role | Plan) -> dict[str, Any]:
    """Only what is written: another process works out the rest again."""
    return {field.name: getattr(tree, field.name) for field in fields(tree)}


def called(calls: Sequence[BlockCall]) -> list[str]:
    """The blocks of calls, in turn."""
    return list(map(_BLOCK, calls))


@dataclass(frozen=True)
class Role:
    """The ranks of one pipeline coordinate: they run the same program. Orders: `train` and `evaluate`."""

    pipeline: int
    layers: tuple[tuple[int, ...], ...]  # layers of each chunk
    buffers: tuple[Buffer, ...]
    blocks: tuple[Block, ...]
    orders: tuple[tuple[str, tuple[BlockCall, ...]], ...]

    def __getstate__(self) -> dict[str, Any]:
        return _written(self)

    @cached_property
    def block_table(self) -> dict[str, Block]:
        return {block.name: block for block in self.blocks}

    def order(self, name: str) -> tuple[BlockCall, ...]:
        return dict(self.orders)[name]

    def called(self, order: str) -> list[str]:
        """The blocks that an order calls, in turn; made once."""
        if order not in self._called:
            self._called[order] = called(self.order(order))
        return self._called[order]

    @cached_property
    def _called(self) -> dict[str, list[str]]:
        """What `called` has made."""
        return {}

    @cached_property
    def legs(self) -> list[tuple[str, str]]:
        """Its orders, each with the one from which it goes on (`compiler/plan/threads.py`)."""
        return legs((self,))

    @cached_property
    def threads(self) -> dict[str, Threads]:
        """Each order as its micro-batches meet it."""
        return threads(self)

    @cached_property
    def longest(self) -> tuple[str, ...]:
        """Orders that are not the beginning of another one."""
        return tuple(
            name
            for name, calls in self.orders
            if not any(len(calls) < len(others) and others[: len(calls)] == calls for _, others in self.orders)
        )

    def instructions(self, order: str = "train") -> Iterator[tuple[int, int, BlockCall, Instruction]]:
        """The unrolled program: (position of the call, index in the block, call, instruction with concrete names)."""
        for position, call in enumerate(self.order(order)):
            block = self.block_table[call.block]
            arguments = dict(zip(block.parameters, call.arguments, strict=True))
            for index, instruction in enumerate(block.instructions):
                yield position, index, call, _concrete(instruction, arguments)


def _concrete(instruction: Instruction, arguments: dict[str, int]) -> Instruction:
    if not arguments:
        return instruction
    attributes = instruction.attributes
    if instruction.opcode == "load_batch":
        attributes = tuple((k, arguments.get(str(v), v) if k == "micro_batch" else v) for k, v in attributes)
    elif instruction.when:
        attributes = tuple((k, unroll(str(v), arguments) if k == "frame" else v) for k, v in attributes)
    return Instruction(
        instruction.opcode,
        tuple(unroll(n, arguments) for n in instruction.writes),
        tuple(unroll(n, arguments) for n in instruction.reads),
        tuple(unroll(n, arguments) for n in instruction.updates),
        instruction.unit,
        instruction.group,
        instruction.stream,
        attributes,
    )


@dataclass(frozen=True)
class Plan:
    """`settings` are (key, JSON text) pairs (cluster, limit, training, data, strategy): no spec is needed beside it."""

    version: int
    settings: tuple[tuple[str, str], ...]
    mesh: Mesh
    groups: tuple[Group, ...]
    tensors: tuple[tuple[str, TensorType], ...]
    buckets: tuple[Bucket, ...]
    parameters: tuple[Parameter, ...]
    segments: tuple[Segment, ...]
    roles: tuple[Role, ...]

    def __getstate__(self) -> dict[str, Any]:
        return _written(self)

    @cached_property
    def types(self) -> dict[str, TensorType]:
        return dict(self.tensors)

    @cached_property
    def segment_table(self) -> dict[str, Segment]:
        return {segment.name: segment for segment in self.segments}

    @cached_property
    def bucket_table(self) -> dict[str, Bucket]:
        return {bucket.name: bucket for bucket in self.buckets}

    @cached_property
    def parameter_table(self) -> dict[str, Parameter]:
        return {parameter.name: parameter for parameter in self.parameters}

    @cached_property
    def _buckets(self) -> dict[str, Bucket]:
        """What `bucket_of` has found."""
        return {}

    @cached_property
    def group_table(self) -> dict[str, Group]:
        return {group.name: group for group in self.groups}

    @cached_property
    def setting_table(self) -> dict[str, Any]:
        return {key: json.loads(text) for key, text in self.settings}

    def with_settings(self, settings: tuple[tuple[str, str], ...]) -> Plan:
        """The same plan with other settings; what was worked out of the rest stays known."""
        found = replace(self, settings=settings)
        known = {name: value for name, value in vars(self).items() if name not in vars(found)}
        vars(found).update(known, settings=settings)
        vars(found).pop("setting_table", None)
        return found

    def setting(self, key: str, default: Any = None) -> Any:
        return self.setting_table.get(key, default)

    def role_of(self, rank: int) -> Role:
        """The role whose program a rank runs."""
        return self.roles[self.mesh.coordinates(rank)["pipeline"]]

    def group_members(self, rank: int, group: str) -> tuple[int, ...]:
        """Global ranks of the group of this name that `rank` belongs to."""
        declared = self.group_table.get(group)
        if declared:
            return self.mesh.members(rank, declared.axes, declared.pipeline)
        return self.mesh.members(rank, group)

    def group_size(self, group: str) -> int:
        declared = self.group_table.get(group)
        if declared is None:
            return self.mesh.size(group)
        size = self.mesh.size(declared.axes)
        return size // self.mesh.size("pipeline") * len(declared.pipeline) if declared.pipeline else size

    def position(self, coordinates: dict[str, int], group: str) -> int:
        """Position of the rank with these coordinates in its group of this name, which must hold it."""
        declared = self.group_table.get(group)
        if declared is None or not declared.pipeline:
            return self.mesh.coordinate(coordinates, declared.axes if declared else group)
        return self.mesh.members(self.mesh.rank(coordinates), declared.axes, declared.pipeline).index(
            self.mesh.rank(coordinates)
        )

    def bucket_of(self, name: str) -> Bucket:
        """The bucket of a buffer (`p.l0`), of gathered parameters (`w.l0:i`), of a whole gradient (`dw.l0.c2:i`) or of
        optimizer state on the device (`state.l0`).

        Raises KeyError when the name belongs to none.
        """
        found = self._buckets.get(name)
        if found is None:
            table = self.bucket_table
            rest = base_name(name).removeprefix("r.").partition(".")[2]
            while rest not in table and "." in rest:
                rest = rest.rpartition(".")[0]
            found = self._buckets[name] = table[rest]
        return found

    def shard_degree(self, bucket: Bucket) -> int:
        """Number of ranks that share the sharded buffers of a bucket."""
        return self.group_size(bucket.shards) if bucket.sharded else 1

    def spans_homes(self, bucket: Bucket) -> bool:
        """Whether the shard group of a bucket joins all its homes."""
        declared = self.group_table.get(bucket.shards)
        return declared is not None and declared.pipeline == bucket.homes

    @cached_property
    def alike(self) -> tuple[Like, ...]:
        """For each role, in order, which one stands for it (`compiler/plan/alike.py`)."""
        return alike(self)

    @cached_property
    def legs(self) -> list[tuple[str, str]]:
        """The orders of all roles, each with the one from which all go on (`compiler/plan/threads.py`)."""
        return legs(self.roles)

    @cached_property
    def memory(self) -> tuple[dict[str, int], ...]:
        """Bytes of each role on the device by component (`compiler/plan/sizes.py`), for ledger and proof."""
        from titan.compiler.plan.sizes import Sizes, memory_by_component

        sizes = Sizes(self)
        return tuple(memory_by_component(self, role, sizes) for role in self.roles)

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        """Those of all blocks; of lists that are written in several layers once."""
        lists = (text(block.instructions) for role in self.roles for block in role.blocks)
        once = {id(listed): listed for listed in lists}
        return tuple(part for listed in once.values() for part in stretches(listed))

    @cached_property
    def opcodes(self) -> frozenset[str]:
        """All that are in use."""
        return frozenset(opcode for part in self.stretches for opcode in set(map(_OPCODE, part.instructions)))

    @property
    def adaptive(self) -> bool:
        """Whether recompute tiers are left to the run."""
        return "watermark" in self.opcodes

    @cached_property
    def plan_only(self) -> tuple[str, ...]:
        """Operators, and products in 8 bits, that the runtime does not have yet."""
        calls = [call for segment in self.segments for call in segment.body]
        found = [call.operator for call in calls if call.row.plan_only]
        found += ["linear in 8 bits" for call in calls if dict(call.attributes).get("product") == "f8"]
        return tuple(dict.fromkeys(found))

    def bucket_parameters(self, bucket: str) -> tuple[Parameter, ...]:
        return tuple(p for p in self.parameters if p.bucket == bucket)
