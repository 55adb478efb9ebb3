"""Quantities that follow from a plan and are never stored in it: bytes, FLOPs, traffic, the curve of live bytes.

`Sizes(plan)` remembers what it has worked out; the module's functions ask a fresh one. All sizes are bytes on one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any, TypeVar, cast

from titan.compiler.plan.alike import Like
from titan.compiler.plan.calls import Calls, Liveness
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.inside import Inside
from titan.compiler.plan.instruction import HOST, Instruction, base_name, original, type_name
from titan.compiler.plan.listing import Renaming, copies, distinct, stretches
from titan.compiler.plan.opcodes import ASYNCHRONOUS
from titan.compiler.plan.operators import DTYPE_BYTES, Flops, statistics_dtype
from titan.compiler.plan.program import Block, Plan, Role
from titan.compiler.plan.segment import parse_unit
from titan.compiler.plan.staging import NOTHING, Staging, staging
from titan.compiler.plan.storages import block_profile
from titan.compiler.plan.tensor import TensorType
from titan.compiler.plan.tiers import layer_of, start_tiers
from titan.compiler.plan.workspace import rebuild_flops, segment_flops, segment_inside, weight_frame_bytes

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Traffic:
    """`payload`: bytes of the whole tensor that is moved or formed; `wire`: bytes each member sends (ring volume)."""

    payload: int
    wire: int


UNSTAGED = frozenset(("send", "recv", "offload", "prefetch", "unshard", "broadcast"))
WIDENED = 1 << 19  # bytes of a gradient in float64 that the norm forms at once on CPU
STRETCH = 1 << 18  # elements of a clipped gradient that the optimizer forms at once
_NO_TRAFFIC = Traffic(0, 0)
_UNIT = attrgetter("unit")


def gradient_dtype(bucket_dtype: str) -> str:
    """Gradients and optimizer state are float32, or float64 in a float64 run."""
    return "f64" if bucket_dtype == "f64" else "f32"


class Sizes:
    """Sizes of one plan, each worked out once."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._types: dict[str, int] = {}
        self._registers: dict[str, int] = {}
        self._flops: dict[str, Flops] = {}
        self._inside: dict[tuple[object, ...], Inside] = {}
        self._staged: dict[tuple[object, ...], Staging] = {}
        self._issued: dict[int, dict[str, Staging]] = {}
        self._likes: dict[int, Like] = {}
        self._measured: dict[tuple[int, object], tuple[Role, Any]] = {}

    def stands_for(self, role: Role) -> Like:
        """Whose sizes a role has: those of the first one of the plan that is like it. Where tiers are left to the run
        they are those with which the layers of a role begin."""
        if not self._likes and not self.plan.adaptive:
            self._likes = {id(like.role): like for like in self.plan.alike}
        return self._likes.get(id(role)) or Like(role, role, Renaming.by(0))

    def each(self, role: Role, measure: Callable[[Block, Sizes, Role], T]) -> dict[str, T]:
        """What is measured of every block of a role; once for roles that are alike."""
        found = self._of_first(role, measure, lambda first: [measure(block, self, first) for block in first.blocks])
        return {block.name: one for block, one in zip(role.blocks, found, strict=True)}

    def once(self, role: Role, measure: Callable[[Role, Sizes], T]) -> T:
        """What is measured of a whole role; once for roles that are alike."""
        return self._of_first(role, measure, lambda first: measure(first, self))

    def _of_first(self, role: Role, measure: object, measured: Callable[[Role], T]) -> T:
        first = self.stands_for(role).first
        known = self._measured.get((id(first), measure))
        if known is None:
            known = self._measured[id(first), measure] = first, measured(first)
        return cast(T, known[1])

    @cached_property
    def start(self) -> dict[int, str]:
        """Recompute tiers with which a plan begins that leaves them to the run."""
        return start_tiers(self.plan)

    def runs(self, instruction: Instruction) -> bool:
        """Whether an instruction runs with the tiers that the plan begins with."""
        if not instruction.attributes or not instruction.when:
            return True
        return self.start[layer_of(instruction.frame)] in instruction.when

    def host(self, name: str) -> int:
        """Bytes of a register in host memory."""
        return self._typed(type_name(name)) if name.startswith(HOST) else 0

    def register(self, name: str) -> int:
        """Bytes of a register on the device; copies on the host (`host.`), tokens of transfers (`t.`), in-place
        collectives (`u.`) and tiers (`tier.`) have none. Raises KeyError when neither the plan's tensors nor its
        segments know the name."""
        found = self._registers.get(name)
        if found is None:
            found = self._registers[name] = 0 if name.startswith(HOST) else self._typed(type_name(name))
        return found

    def _typed(self, key: str) -> int:
        found = self._types.get(key)
        if found is None:
            found = self._types[key] = self._measure(key)
        return found

    def _measure(self, key: str) -> int:
        prefix, _, rest = key.partition(".")
        if prefix in ("t", "u", "tier"):
            return 0
        if prefix in ("w", "dw"):
            return self.whole_bucket(key)
        if prefix == "state":
            return self.optimizer_state(key)
        if prefix in ("f", "fs", "fn"):
            segment = self.plan.segment_table[rest]
            return segment.bytes_of(segment.pieces[prefix])
        if prefix == "wf":
            return weight_frame_bytes(self.plan.segment_table[rest])
        return self.plan.types[key].bytes

    def segment_flops(self, name: str) -> Flops:
        if name not in self._flops:
            self._flops[name] = segment_flops(self.plan.segment_table[name])
        return self._flops[name]

    def flops(self, instruction: Instruction) -> float:
        """Floating-point operations of one instruction on one rank (matrix products and element-wise work)."""
        if not instruction.unit:
            return 0.0
        name = parse_unit(instruction.unit)[0]
        if instruction.opcode == "recompute":
            return rebuild_flops(self.plan.segment_table[name], str(instruction.attribute("tier")))
        work = self.segment_flops(name)
        return {
            "forward": work.forward,
            "backward": work.backward_input + work.backward_weight,
            "backward_input": work.backward_input,
            "backward_weight": work.backward_weight,
        }.get(instruction.opcode, 0.0)

    def inside(self, instruction: Instruction) -> Inside:
        """What a compute instruction holds while it runs."""
        name = parse_unit(instruction.unit)[0]
        key = (name, instruction.opcode, instruction.attributes, tuple([w[:3] for w in instruction.writes]))
        found = self._inside.get(key)
        if found is None:
            pieces = tuple(w.partition(".")[0] for w in instruction.writes if w.startswith(("f.", "fs.", "fn.")))
            carried = tuple(w for w in str(instruction.attribute("carry")).split(",") if w)
            tier, segment = str(instruction.attribute("tier")), self.plan.segment_table[name]
            found = self._inside[key] = segment_inside(segment, instruction.opcode, pieces, tier, carried)
        return found

    def workspace(self, instruction: Instruction) -> int:
        """Bytes that an instruction needs beside what it reads and writes, while it runs."""
        if instruction.unit:
            found = self.inside(instruction)
            return found.peak - found.left
        if instruction.opcode == "optimizer_step" and self.plan.setting("train.clip"):
            return min(self._owned(instruction.reads[0]), STRETCH * self._statistic)
        if instruction.opcode == "grad_norm" and self._host and self._statistic < 8:
            most = max(map(self._owned, instruction.reads), default=0)
            return min(8 // self._statistic * most, WIDENED)
        return 0

    @cached_property
    def _statistic(self) -> int:
        """Bytes of an element of gradients."""
        return max((DTYPE_BYTES[gradient_dtype(bucket.dtype)] for bucket in self.plan.buckets), default=4)

    def _owned(self, gradient: str) -> int:
        """Bytes of the part of a gradient that this rank updates."""
        bucket = self.plan.bucket_of(gradient)
        return bucket.local("o", self.plan.shard_degree(bucket)) * self._statistic

    def values(self, name: str) -> tuple[int, ...]:
        """Bytes of the values that a register holds: several of a frame."""
        kind, _, unit = original(name).removeprefix("r.").partition(".")
        if kind not in ("f", "fs", "fn", "wf"):
            return (self.register(name),)
        segment = self.plan.segment_table[parse_unit(unit)[0]]
        held = segment.weight_frame if kind == "wf" else segment.pieces[kind]
        return tuple(segment.types[value.removeprefix("d.")].bytes for value in held)

    @cached_property
    def _host(self) -> bool:
        """Whether ranks compute on CPUs, which gloo joins."""
        return not any((self.plan.setting("cluster", {}).get("device", {}).get("peak") or {}).values())

    def staged(self, issue: Instruction) -> Staging:
        """What the transport holds for an asynchronous instruction."""
        if issue.opcode in UNSTAGED:
            return NOTHING
        names = (*issue.updates, *issue.reads, issue.writes[0]) if issue.opcode == "reduce_grad" else ()
        kinds = names or (type_name(issue.writes[0]), *map(type_name, issue.reads))  # equal in all layers of a kind
        key = (issue.opcode, kinds, issue.group, issue.attributes)
        found = self._staged.get(key)
        if found is None:
            found = self._staged[key] = self._staging(issue)
        return found

    def issued(self, role: Role) -> dict[str, Staging]:
        """The same for all that a role's blocks issue, by the base name of the pending register."""
        if role.pipeline not in self._issued:
            found: dict[str, Staging] = {}
            transfers: dict[str, Staging] = {}  # of one name those are waited for in other blocks
            for stretch in (s for block in role.blocks for s in stretches(block.instructions)):
                for issue in [i for i in stretch.instructions if i.opcode in ASYNCHRONOUS]:
                    staged, table = self.staged(issue), transfers if issue.row.kind == "transfer" else found
                    name = base_name(issue.writes[0])
                    table[name] = staged
                    if stretch.times > 1 and staged != NOTHING:
                        table |= dict.fromkeys(copies(name, stretch.step, stretch.times), staged)
            self._issued[role.pipeline] = found | transfers
        return self._issued[role.pipeline]

    def _staging(self, issue: Instruction) -> Staging:
        members, result = self.plan.group_size(issue.group), self.register(issue.writes[0])
        if issue.opcode != "reduce_grad":
            (name,) = issue.reads
            operand = self.plan.types.get(type_name(name)) or self.plan.types[type_name(issue.writes[0])]
            return staging(issue, operand, result, members, self._host)
        bucket = self.plan.bucket_of(issue.updates[0])
        dtype = gradient_dtype(bucket.dtype)
        elements = self.whole_bucket(f"g.{bucket.name}") if issue.reads else self.held_bucket(issue.updates[0])
        elements //= DTYPE_BYTES[dtype]
        if issue.attribute("mode") == "all_reduce_shard" and "g" not in bucket.sharded:
            elements //= self.plan.group_size(str(issue.attribute("shard")))
        return staging(issue, TensorType(dtype, (elements,)), result, members, self._host)

    def whole_bucket(self, name: str) -> int:
        """Bytes of a whole bucket: parameters `p.l0`, `w.l0:i` in their dtype, gradients `g.l0`, `dw.l0:i` so."""
        bucket = self.plan.bucket_of(name)
        dtype = bucket.dtype if name.removeprefix("r.")[0] in "pw" else gradient_dtype(bucket.dtype)
        return bucket.elements * DTYPE_BYTES[dtype]

    def held_bucket(self, name: str) -> int:
        """Bytes of a bucket's buffer `p.l0` or `g.l0` on one rank: the shard where that is sharded."""
        bucket, kind = self.plan.bucket_of(name), name[0]
        degree = self.plan.shard_degree(bucket) if kind in bucket.sharded else 1
        return self.whole_bucket(name) // degree

    def optimizer_state(self, name: str) -> int:
        """Bytes of a bucket's optimizer state on one rank (`state.l0`), which is also that of its buffer `o.l0`."""
        bucket = self.plan.bucket_of(name)
        elements = bucket.state_copies * bucket.local("o", self.plan.shard_degree(bucket))
        return elements * DTYPE_BYTES[gradient_dtype(bucket.dtype)]

    def traffic(self, instruction: Instruction) -> Traffic:
        """Bytes moved by a collective or transfer: ring volumes, `(n-1)/n` of the whole per pass over the n members. A
        copy to or from the host has a payload and sends nothing."""
        kind = instruction.row.kind
        if kind == "host":
            moved = instruction.reads[0] if instruction.opcode == "offload" else instruction.writes[0]
            return Traffic(self._typed(type_name(moved)), 0)
        if kind == "transfer":
            size = self.register(instruction.reads[0] if instruction.opcode == "send" else instruction.writes[0])
            return Traffic(size, size if instruction.opcode == "send" else 0)
        if kind == "collective":
            return self._collective(instruction)
        if instruction.opcode in ("unshard", "reduce_grad"):
            return self._in_place(instruction)
        return _NO_TRAFFIC

    def _collective(self, instruction: Instruction) -> Traffic:
        members = self.plan.group_size(instruction.group)
        if instruction.opcode in ("all_gather", "broadcast", "all_reduce"):
            whole = self.register(instruction.writes[0])
        else:
            whole = self.register(instruction.reads[0])
        passes = 2 if instruction.opcode == "all_reduce" else 1
        return Traffic(whole, passes * whole * (members - 1) // members)

    def _in_place(self, instruction: Instruction) -> Traffic:
        """Parameters gathered, or gradients summed: in place, from a shard into a register, or back."""
        members = self.plan.group_size(instruction.group)
        mode = instruction.attribute("mode") if instruction.opcode == "reduce_grad" else ""
        if mode == "all_reduce":
            whole = self.held_bucket(instruction.updates[0])
        else:
            whole = self.whole_bucket((*instruction.reads, *instruction.updates)[0])
        if mode == "all_reduce_shard":
            whole //= self.plan.group_size(str(instruction.attribute("shard")))
        passes = 1 if mode in ("", "reduce_scatter") else 2
        return Traffic(whole, passes * whole * (members - 1) // members)


def _tables(role: Role, sizes: Sizes) -> int:
    """Bytes of the cosines and sines that rotary positions keep: of forward and of backward."""
    units = set(map(_UNIT, chain.from_iterable(distinct(block.instructions) for block in role.blocks)))
    segments = [sizes.plan.segment_table[name] for name in {parse_unit(unit)[0] for unit in units if unit}]
    found = {
        (kind.shape[1], int(attributes["head_dim"]), statistics_dtype(kind.dtype), call.attributes)
        for segment in segments
        for call in segment.body
        if call.operator == "rope"
        for kind, attributes in ((segment.types[call.operands[0]], dict(call.attributes)),)
    }
    return sum(4 * length * width * DTYPE_BYTES[dtype] for length, width, dtype, _ in found)


def register_bytes(plan: Plan, name: str) -> int:
    """Bytes of one register on one rank."""
    return Sizes(plan).register(name)


def instruction_bytes(plan: Plan, instruction: Instruction) -> Traffic:
    """Bytes that a collective or transfer moves."""
    return Sizes(plan).traffic(instruction)


def instruction_flops(plan: Plan, instruction: Instruction) -> float:
    """Floating-point operations of one instruction on one rank."""
    return Sizes(plan).flops(instruction)


def liveness(plan: Plan, role: Role, order: str = "train", sizes: Sizes | None = None) -> Liveness:
    """Walks the calls of an order; exact for the registers, in bytes on one rank."""
    profiles = (sizes or Sizes(plan)).each(role, block_profile)
    return Calls(profiles).walked(role.called(order))


_COMPONENT = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer"}


def memory_by_component(plan: Plan, role: Role, sizes: Sizes | None = None) -> dict[str, int]:
    """Bytes of a role on the device: `parameters`, `gradients`, `optimizer`, `buffers` (the rest, and tables of
    positions), `activations` and `workspace` at the highest moment of any order. Their sum is the peak of what the plan
    itself holds there."""
    sizes = sizes or Sizes(plan)
    found = dict.fromkeys(("parameters", "gradients", "optimizer", "buffers"), 0)
    for buffer in role.buffers:
        if buffer.place == "device":
            found[_COMPONENT.get(buffer.kind, "buffers")] += buffer.bytes
    found["buffers"] += sizes.once(role, _tables)
    calls = Calls(sizes.each(role, block_profile))
    walks = [calls.walked(calls.once(role.called(name))) for name in role.longest]
    highest = max(walks, key=lambda walk: walk.peak, default=Liveness(0, 0, 0, (-1, -1), ()))
    return {**found, "activations": highest.registers, "workspace": highest.workspace}
