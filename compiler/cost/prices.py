"""Prices of a plan's instructions in whole nanoseconds, memoised by segment and opcode, and by what is moved where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

from titan.compiler.cost.compute import Seconds, call_seconds, moved_seconds, optimizer_seconds
from titan.compiler.cost.machine import Machine, read_machine
from titan.compiler.cost.network import Placement, Stride, bases, collective_seconds, place, transfer_seconds
from titan.compiler.plan.alike import Like
from titan.compiler.plan.instruction import Instruction, type_name
from titan.compiler.plan.listing import distinct
from titan.compiler.plan.operators import DTYPE_BYTES, statistics_dtype
from titan.compiler.plan.program import Bucket, Plan, Role
from titan.compiler.plan.segment import Call, Segment, parse_unit
from titan.compiler.plan.sizes import Sizes

FREE = ("wait", "free", "report", "watermark")


class Prices:
    """Prices for one plan on one machine; `price(role, instruction)` is the time of the instruction alone."""

    def __init__(self, plan: Plan, machine: Machine | None = None) -> None:
        self.plan = plan
        self.machine = machine or read_machine(plan.setting("cluster"))
        self._host = _nanoseconds(self.machine.figures["instruction_seconds"])
        self.issue = _nanoseconds(self.machine.figures["issue_seconds"])
        self._segments: dict[str, Seconds] = {}
        self._memo: dict[tuple[object, ...], int] = {}
        self._placements: dict[tuple[str, int], Placement] = {}  # by group, and where on a node a role begins
        self._groups: dict[int, tuple[str, ...]] = {}  # of a role, inside it
        self._distance = _distances(plan)
        self._sizes = Sizes(plan)

    def price(self, role: Role, instruction: Instruction) -> int:
        """Nanoseconds; the slower one where ranks of the role differ."""
        opcode, row = instruction.opcode, instruction.row
        if opcode in FREE:
            return self._host
        if row.unit:
            return self._host + self._unit(opcode, parse_unit(instruction.unit)[0], str(instruction.attribute("tier")))
        if row.asynchronous:
            return self._asynchronous(role, instruction)
        return self._host + _nanoseconds(self._plain(instruction))

    def _unit(self, opcode: str, segment: str, tier: str) -> int:
        key = (opcode, segment, tier)
        if key not in self._memo:
            self._memo[key] = _nanoseconds(self._unit_seconds(opcode, segment, tier))
        return self._memo[key]

    def _unit_seconds(self, opcode: str, name: str, tier: str) -> float:
        if opcode == "recompute":
            segment = self.plan.segment_table[name]
            return self.segment(replace(segment, body=segment.rebuild_body(tier))).forward
        if name not in self._segments:
            self._segments[name] = self.segment(self.plan.segment_table[name])
        found, host = self._segments[name], self._host_seconds(name)
        if opcode == "forward":
            return max(found.forward, host)
        inputs = max(found.backward_input, host) if opcode != "backward_weight" else 0.0
        return inputs + (found.backward_weight if opcode != "backward_input" else 0.0)

    def segment(self, segment: Segment) -> Seconds:
        """All calls of a segment one after another."""
        return sum((self.call(segment, call) for call in segment.body), Seconds())

    def call(self, segment: Segment, call: Call) -> Seconds:
        return call_seconds(self.machine, segment, call)

    def _host_seconds(self, name: str) -> float:
        """Time in which the host issues the operators of a segment."""
        return self.machine.figures["host_seconds"] * len(self.plan.segment_table[name].body)

    def _plain(self, instruction: Instruction) -> float:
        """Parameter and data instructions: bound by memory."""
        curve = self.machine.curves.get(instruction.opcode)
        if curve is not None:
            return curve(self.plain_bytes(instruction))
        if instruction.opcode == "add":
            return moved_seconds(self.machine, 3.0 * self.plan.types[type_name(instruction.writes[0])].bytes)
        if instruction.opcode == "grad_norm":
            grads = [r for r in instruction.reads if r.startswith("g.")]
            return sum(moved_seconds(self.machine, self._grad_bytes(self._bucket(r), own=True)) for r in grads)
        if instruction.opcode == "open_grad":
            return moved_seconds(self.machine, self._sizes.whole_bucket(instruction.writes[0]))
        if instruction.opcode == "zero_grad":
            return sum(moved_seconds(self.machine, self._zeroed_bytes(u)) for u in instruction.updates)
        if instruction.opcode == "optimizer_step":
            bucket = self._bucket(instruction.updates[0])
            return optimizer_seconds(self.machine, bucket, self._own_elements(bucket))
        return self.machine.figures["launch_seconds"]

    def plain_bytes(self, instruction: Instruction) -> float:
        """Bytes that size a parameter or data instruction on a measured curve: gradients read, buffers zeroed, own
        elements of what is updated (in their dtype), values added or loaded."""
        if instruction.opcode == "grad_norm":
            return float(sum(self._grad_bytes(self._bucket(r), own=True) for r in instruction.reads if r[:2] == "g."))
        if instruction.opcode == "zero_grad":
            return float(sum(self._zeroed_bytes(u) for u in instruction.updates))
        if instruction.opcode == "optimizer_step":
            bucket = self._bucket(instruction.updates[0])
            return float(self._own_elements(bucket) * DTYPE_BYTES[bucket.dtype])
        if instruction.opcode == "open_grad":
            return float(self._sizes.whole_bucket(instruction.writes[0]))
        return float(sum(self._sizes.register(name) for name in instruction.writes))

    def _asynchronous(self, role: Role, instruction: Instruction) -> int:
        if instruction.row.kind == "transfer":
            return self._transfer(role, instruction)
        if instruction.row.kind == "host":
            link = self.machine.host
            return _nanoseconds(link.latency + self._sizes.traffic(instruction).payload / link.bandwidth)
        moved, kind = self.whole_bytes(instruction), _algorithm(instruction)
        key = (kind, self.placement(role, instruction.group), moved)
        if key not in self._memo:
            self._memo[key] = _nanoseconds(collective_seconds(self.machine, *key))
        return self._memo[key]

    def _transfer(self, role: Role, instruction: Instruction) -> int:
        """Both sides of a channel see one price: the pair is named by its lower rank."""
        register = type_name((instruction.reads or instruction.writes)[0])
        if instruction.group != "pipeline":
            return self._ring_transfer(role, instruction, register)
        peer = int(instruction.attribute("peer", 1))
        low = min(role.pipeline, role.pipeline + peer)
        key = (instruction.group, low, abs(peer), register)
        if key not in self._memo:
            crosses = self._crosses_nodes(instruction.group, low, abs(peer))
            senders = min(self._distance[instruction.group] * abs(peer), self.machine.devices_per_node)
            moved = self.plan.types[register].bytes
            self._memo[key] = _nanoseconds(transfer_seconds(self.machine, crosses, moved, senders))
        return self._memo[key]

    def _ring_transfer(self, role: Role, instruction: Instruction, register: str) -> int:
        """All ranks of a role send and receive at once; the send has the price, its other half ends with it."""
        if instruction.opcode == "recv":
            return 0
        key = ("ring", self.placement(role, instruction.group).nodes > 1, register)
        if key not in self._memo:
            self._memo[key] = _nanoseconds(transfer_seconds(self.machine, key[1], self.plan.types[register].bytes))
        return self._memo[key]

    def whole_bytes(self, instruction: Instruction) -> int:
        """Bytes of the whole tensor that a collective gathers, sums or exchanges."""
        if instruction.opcode in ("unshard", "reduce_grad"):
            return self._sizes.traffic(instruction).payload
        register = instruction.reads[0] if instruction.opcode == "reduce_scatter" else instruction.writes[0]
        return self.plan.types[type_name(register)].bytes

    def _zeroed_bytes(self, buffer: str) -> int:
        """A gradient bucket, or a metric of a few bytes."""
        return self._sizes.held_bucket(buffer) if buffer.startswith("g.") else 8

    def _bucket(self, buffer: str) -> Bucket:
        return self.plan.bucket_table[buffer.partition(".")[2]]

    def _own_elements(self, bucket: Bucket) -> int:
        return bucket.elements // self.plan.shard_degree(bucket)

    def _grad_bytes(self, bucket: Bucket, own: bool = False) -> int:
        elements = self._own_elements(bucket) if own else bucket.elements
        return elements * DTYPE_BYTES[statistics_dtype(bucket.dtype)]

    def lie_alike(self, like: Like, crosses: Callable[[str], bool]) -> bool:
        """Whether groups that a role names, and that do not cross to other roles, lie as those of the role like it."""
        one, other = like.role, like.first
        if other.pipeline not in self._groups:
            issued = (i for block in other.blocks for i in distinct(block.instructions) if i.row.asynchronous)
            self._groups[other.pipeline] = tuple({i.group: None for i in issued if i.group and not crosses(i.group)})
        groups = self._groups[other.pipeline]
        return all(self.placement(one, group) == self.placement(other, group) for group in groups)

    def placement(self, role: Role, group: str) -> Placement:
        """Where the groups of this name that hold ranks of `role` lie."""
        key = (group, role.pipeline * self._distance["pipeline"] % self.machine.devices_per_node)
        found = self._placements.get(key)
        if found is None:
            found = self._placements[key] = self._place(role, group)
        return found

    def _place(self, role: Role, name: str) -> Placement:
        declared = self.plan.group_table.get(name)
        axes = declared.axes if declared else name
        chosen = self.plan.mesh.resolve(axes)
        home = role.pipeline
        inside: list[Stride] = []
        outside: list[Stride] = []
        for factor, size in self.plan.mesh.factors:
            distance, number = self._distance[factor], size
            if factor == "pipeline" and factor in chosen:
                members = (declared.pipeline if declared else ()) or tuple(range(size))
                home, number = members[0], len(members)
                distance *= (members[-1] - members[0]) // max(number - 1, 1)
            if number > 1 and (factor in chosen or factor != "pipeline"):
                (inside if factor in chosen else outside).append((distance, number))
        per_node = self.machine.devices_per_node
        first = home * self._distance["pipeline"]
        return place(tuple(inside), bases(first, tuple(outside), per_node), per_node)

    def _crosses_nodes(self, axis: str, low: int, offset: int) -> bool:
        """Does any pair of the channel between pipeline coordinates `low` and `low + offset` lie on two nodes?"""
        per_node, step = self.machine.devices_per_node, self._distance[axis] * offset
        if step >= per_node:
            return True
        first = low * self._distance["pipeline"]
        ranks = range(first, first + self._distance["pipeline"])
        return any(r // per_node != (r + step) // per_node for r in ranks)


def _algorithm(instruction: Instruction) -> str:
    """The collective that an in-place parameter instruction is."""
    if instruction.opcode == "unshard":
        return "all_gather"
    if instruction.opcode == "reduce_grad":
        return "reduce_scatter" if instruction.attribute("mode") == "reduce_scatter" else "all_reduce"
    return instruction.opcode


def _distances(plan: Plan) -> dict[str, int]:
    """Ranks between neighbours on each factor."""
    factors = plan.mesh.factors
    return {name: prod(size for _, size in factors[k + 1 :]) for k, (name, _) in enumerate(factors)}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
