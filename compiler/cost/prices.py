"""Prices of a plan's instructions in whole nanoseconds, memoised by segment and opcode, and by what is moved where."""

from __future__ import annotations

from math import prod

from titan.compiler.cost.compute import Seconds, moved_seconds, optimizer_seconds, segment_seconds
from titan.compiler.cost.machine import Machine, read_machine
from titan.compiler.cost.network import Placement, Stride, bases, collective_seconds, place, transfer_seconds
from titan.compiler.plan.instruction import Instruction, type_name
from titan.compiler.plan.operators import DTYPE_BYTES, statistics_dtype
from titan.compiler.plan.program import Bucket, Plan, Role
from titan.compiler.plan.segment import parse_unit

_FREE = ("wait", "free", "report")


class Prices:
    """Prices for one plan on one machine; `price(role, instruction)` is the time of the instruction alone."""

    def __init__(self, plan: Plan, machine: Machine | None = None) -> None:
        self.plan = plan
        self.machine = machine or read_machine(plan.setting("cluster"))
        self._segments: dict[str, Seconds] = {}
        self._memo: dict[tuple[object, ...], int] = {}
        self._placements: dict[tuple[str, int], Placement] = {}
        self._distance = _distances(plan)

    def price(self, role: Role, instruction: Instruction) -> int:
        """Nanoseconds; the slower one where ranks of the role differ."""
        opcode, row = instruction.opcode, instruction.row
        if opcode in _FREE:
            return 0
        if row.unit:
            return self._unit(opcode, parse_unit(instruction.unit)[0])
        if row.asynchronous:
            return self._asynchronous(role, instruction)
        return _nanoseconds(self._plain(instruction))

    def _unit(self, opcode: str, segment: str) -> int:
        key = (opcode, segment)
        if key not in self._memo:
            self._memo[key] = _nanoseconds(self._unit_seconds(opcode, segment))
        return self._memo[key]

    def _unit_seconds(self, opcode: str, name: str) -> float:
        if name not in self._segments:
            self._segments[name] = segment_seconds(self.machine, self.plan.segment_table[name])
        found = self._segments[name]
        if opcode in ("forward", "recompute"):
            return found.forward
        inputs = found.backward_input if opcode != "backward_weight" else 0.0
        return inputs + (found.backward_weight if opcode != "backward_input" else 0.0)

    def _plain(self, instruction: Instruction) -> float:
        """Parameter and data instructions: bound by memory."""
        if instruction.opcode == "add":
            return moved_seconds(self.machine, 3.0 * self.plan.types[type_name(instruction.writes[0])].bytes)
        if instruction.opcode == "grad_norm":
            grads = [r for r in instruction.reads if r.startswith("g.")]
            return sum(moved_seconds(self.machine, self._grad_bytes(self._bucket(r), own=True)) for r in grads)
        if instruction.opcode == "zero_grad":
            return sum(moved_seconds(self.machine, self._zeroed_bytes(u)) for u in instruction.updates)
        if instruction.opcode == "optimizer_step":
            bucket = self._bucket(instruction.updates[0])
            return optimizer_seconds(self.machine, bucket, self._own_elements(bucket))
        return self.machine.figures["launch_seconds"]

    def _asynchronous(self, role: Role, instruction: Instruction) -> int:
        if instruction.row.kind == "transfer":
            return self._transfer(role, instruction)
        moved, kind = self.whole_bytes(instruction), _algorithm(instruction)
        key = (kind, self.placement(role, instruction.group), moved)
        if key not in self._memo:
            self._memo[key] = _nanoseconds(collective_seconds(self.machine, *key))
        return self._memo[key]

    def _transfer(self, role: Role, instruction: Instruction) -> int:
        """Both sides of a channel see one price: the pair is named by its lower rank."""
        register = type_name((instruction.reads or instruction.writes)[0])
        peer = int(instruction.attribute("peer", 1))
        low = min(role.pipeline, role.pipeline + peer) if instruction.group == "pipeline" else role.pipeline
        key = (instruction.group, low, abs(peer), register)
        if key not in self._memo:
            crosses = self._crosses_nodes(instruction.group, low, abs(peer))
            moved = self.plan.types[register].bytes
            self._memo[key] = _nanoseconds(transfer_seconds(self.machine, crosses, moved))
        return self._memo[key]

    def whole_bytes(self, instruction: Instruction) -> int:
        """Bytes of the whole tensor that a collective gathers, sums or exchanges."""
        if instruction.opcode == "unshard":
            bucket = self._bucket(instruction.updates[0])
            return bucket.elements * DTYPE_BYTES[bucket.dtype]
        if instruction.opcode == "reduce_grad":
            bucket = self._bucket(instruction.updates[0])
            shard = str(instruction.attribute("shard", ""))
            return self._grad_bytes(bucket) // (self.plan.group_size(shard) if shard else 1)
        register = instruction.reads[0] if instruction.opcode == "reduce_scatter" else instruction.writes[0]
        return self.plan.types[type_name(register)].bytes

    def _zeroed_bytes(self, buffer: str) -> int:
        """A gradient bucket, or a metric of a few bytes."""
        return self._grad_bytes(self._bucket(buffer)) if buffer.startswith("g.") else 8

    def _bucket(self, buffer: str) -> Bucket:
        return self.plan.bucket_table[buffer.partition(".")[2]]

    def _own_elements(self, bucket: Bucket) -> int:
        return bucket.elements // (self.plan.group_size(bucket.replicas) if bucket.sharded else 1)

    def _grad_bytes(self, bucket: Bucket, own: bool = False) -> int:
        elements = self._own_elements(bucket) if own else bucket.elements
        return elements * DTYPE_BYTES[statistics_dtype(bucket.dtype)]

    def placement(self, role: Role, group: str) -> Placement:
        """Where the groups of this name that hold ranks of `role` lie."""
        key = (group, role.pipeline)
        if key not in self._placements:
            self._placements[key] = self._place(role, group)
        return self._placements[key]

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
