"""Prices of a plan's instructions as the software of a published run executes them."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod

from titan.compiler.cost.compute import Seconds, moved_seconds
from titan.compiler.cost.machine import Machine
from titan.compiler.cost.network import collective_seconds
from titan.compiler.cost.prices import Prices
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.operators import TensorType
from titan.compiler.plan.program import Plan, Role
from titan.compiler.plan.segment import Call, Segment, parse_unit

from tests.benchmarks.published_runs.software import SEPARATE, SUM_BYTES, Software

PERSISTENT = 100_000  # numbers of a parameter that DeepSpeed does not shard, its param_persistence_threshold
PRODUCTS = ("linear", "expert_linear")
ROUTED = ("dispatch", "combine", "expert_swiglu", "route")


def traced(plan: Plan, software: Software) -> Plan:
    """The plan with attention that forms its scores, where the software had no fused one."""
    if software.attention != "scores":
        return plan
    return replace(plan, segments=tuple(_scored(s, software.again.attention > 0) for s in plan.segments))


def _scored(segment: Segment, again: bool) -> Segment:
    body: list[Call] = []
    values = dict(segment.values)
    for call in segment.body:
        if call.operator == "attention":
            _, lse = call.results
            call = replace(call, operator="attention_scores")
            (_, (_, shape)) = call.row.typing(dict(call.attributes), tuple(values[o] for o in call.operands))
            values[lse] = TensorType("u8", (1,) if again else shape)
        body.append(call)
    return replace(segment, body=tuple(body), values=tuple(values.items()))


def sent_share(experts: int, places: int, most: int = 0) -> float:
    """Copies of a token that is sent once to each place with any of the `experts` that it is routed to, on average over
    even routing, as a share of one for each expert."""
    reached = places * (1 - (1 - 1 / places) ** experts)
    return min(reached, float(most or places)) / experts


def _is_gradient_sum(instruction: Instruction) -> bool:
    """Whether tensor ranks sum gradients of a product's input, which its weights' gradient does not wait for."""
    summed = instruction.opcode in ("all_reduce", "reduce_scatter") and instruction.group.startswith("tensor")
    return summed and any(name.startswith("d.") for name in instruction.reads)


class RunPrices(Prices):
    """Prices of a plan as `software` executes it on `machine`."""

    def __init__(self, plan: Plan, machine: Machine, software: Software) -> None:
        super().__init__(plan, machine)
        self.software = software
        self._near: dict[int, float] = {}
        self._late: dict[int, int] = {}
        names = [b.name for b in plan.roles[0].blocks if any(i.opcode == "unshard" for i in b.instructions)]
        self._before_use = any(name.startswith("F.") for name in names)  # ZeRO-3

    def price(self, role: Role, instruction: Instruction) -> int:
        if instruction.opcode == "reduce_grad":
            return 0 if self._is_late(instruction) else self._sum(role, instruction)
        found = super().price(role, instruction)
        if instruction.opcode == "unshard":
            return self._gather(role, instruction, found)
        if instruction.opcode == "grad_norm":
            return found + self._late_sums(role)
        if instruction.row.kind == "transfer" and self.software.scattered:
            return found // self.plan.mesh.size("tensor")
        if instruction.row.kind == "collective" and instruction.group.startswith("tensor") and self.software.hidden:
            return round(found * (1 - self.machine.figures[self.software.hidden]))
        if self.software.hidden_sums and _is_gradient_sum(instruction):
            return round(found * (1 - self.machine.figures["summed_under_weights"]))
        if instruction.unit and instruction.opcode in ("backward", "backward_input"):
            name, layer = parse_unit(instruction.unit)
            if layer is not None and self.software.again.collectives and name.endswith("s0"):
                found += round(self.software.again.collectives * self._collectives(role))
        return found

    def whole_bytes(self, instruction: Instruction) -> int:
        found = super().whole_bytes(instruction)
        if instruction.opcode != "all_to_all" or not self.software.sent_once:
            return found
        place = self.placement(self.plan.roles[0], instruction.group)
        if place.nodes == 1:
            return round(found * sent_share(self.software.sent_once, place.size))
        share = sent_share(self.software.sent_once, place.nodes, self.software.most_nodes)
        return round(found * share * self.machine.figures["inter"] / self.machine.figures["dispatched"])

    def _sum(self, role: Role, instruction: Instruction) -> int:
        """A gradient sum; those over replicas of shards run under backward too, beside the sum of the shards."""
        passes = self.machine.figures["deepspeed"] if self.software.deepspeed else 1.0
        if self.software.whole_sum:
            passes *= 2 if instruction.attribute("mode") == "reduce_scatter" else 1
        return round(super().price(role, instruction) * passes * self.software.gradient_bytes / 4) + self._messages(
            role, instruction
        )

    def _gather(self, role: Role, instruction: Instruction, found: int) -> int:
        """A gather of parameters; of those that run under the next forward the last one alone is seen."""
        if self.software.deepspeed:
            return round(found * self.machine.figures["deepspeed"]) + self._messages(role, instruction)
        if self.software.hidden_gather and not self._before_use:
            return found // max(sum(len(held) for held in role.layers), 1)
        return found

    def _messages(self, role: Role, instruction: Instruction) -> int:
        """What moving each parameter of a bucket by itself takes beside moving them together: further latencies."""
        if not (self.software.deepspeed and self._before_use):
            return 0
        placement = self.placement(role, instruction.group)
        once = collective_seconds(self.machine, "all_gather", placement, 0.0)
        bucket = self.plan.bucket_of((instruction.updates or instruction.reads or instruction.writes)[0])
        large = {
            re.sub("[qkv]_proj", "qkv_proj", p.name)
            for p in self.plan.bucket_parameters(bucket.name)
            if prod(p.shape) > PERSISTENT
        }
        return round(1e9 * once * max(len(large) - 1, 0))

    def _is_late(self, instruction: Instruction) -> bool:
        late = self.software.late_sum and instruction.group != "data.shard"
        return late or instruction.group == "data.replicate"

    def _late_sums(self, role: Role) -> int:
        """Sums of gradients after the last backward: what the software does not begin earlier. Sums over replicas run
        under backward, so the last one alone is seen."""
        if role.pipeline not in self._late:
            sums = {i.writes: i for b in role.blocks for i in b.instructions if i.opcode == "reduce_grad"}
            late = [self._sum(role, i) for i in sums.values() if self._is_late(i)]
            beside = all(i.group == "data.replicate" for i in sums.values() if self._is_late(i))
            self._late[role.pipeline] = (max(late, default=0) if beside else sum(late)) if late else 0
        return self._late[role.pipeline]

    def _collectives(self, role: Role) -> float:
        """Nanoseconds of the collectives of one layer's forward."""
        if role.pipeline not in self._near:
            blocks = {
                b.name.split(".")[1]: b for b in role.blocks if b.name.startswith("F.")
            }.values()  # of variants one
            layers = sum(len(held) for held in role.layers)
            total = sum(self.price(role, i) for b in blocks for i in b.instructions if i.row.kind == "collective")
            self._near[role.pipeline] = total / max(layers, 1)
        return self._near[role.pipeline]

    def segment(self, segment: Segment) -> Seconds:
        if not self.software.fused_inputs:
            return super().segment(segment)
        total, fused = Seconds(), set[str]()
        for call in segment.body:
            if call.operator != "linear":
                total += self.call(segment, call)
            elif call.operands[0] not in fused:
                fused.add(call.operands[0])
                total += self._fused(segment, call)
        return total

    def _fused(self, segment: Segment, call: Call) -> Seconds:
        """A product with the weights of all that have its input, side by side."""
        x, weight = call.operands
        wide = sum(
            segment.types[c.operands[1]].shape[0] for c in segment.body if c.operator == "linear" and c.operands[0] == x
        )
        shape = (wide, segment.types[weight].shape[1])
        values = {**segment.types, weight: replace(segment.types[weight], shape=shape)}
        result = call.results[0]
        values[result] = replace(values[result], shape=(*values[result].shape[:-1], wide))
        return self.call(replace(segment, values=tuple(values.items())), call)

    def call(self, segment: Segment, call: Call) -> Seconds:
        found = super().call(segment, call)
        if self.software.separate_sums and call.operator in PRODUCTS and found.backward_weight:
            moved = SUM_BYTES + 2 * self.software.gradient_bytes
            added = moved_seconds(self.machine, moved * segment.types[call.operands[1]].elements)
            return replace(found, backward_weight=found.backward_weight + added)
        if call.operator in self.software.separate:
            forward, backward = SEPARATE[call.operator]
            return Seconds(found.forward * forward, found.backward_input * backward, found.backward_weight)
        if call.operator in ROUTED:
            passes = self.machine.figures["expert_passes"]
            return Seconds(found.forward * passes, found.backward_input * passes, found.backward_weight * passes)
        return found

    def _unit_seconds(self, opcode: str, name: str, tier: str) -> float:
        found = super()._unit_seconds(opcode, name, tier)
        segment = self.plan.segment_table[name]
        repeated = any(p.startswith(".") for p in segment.parameters) or any(
            "attention" in c.operator for c in segment.body
        )
        if opcode in ("backward", "backward_input") and repeated and self.software.again.any:
            found += sum(self._again(call) * self.call(segment, call).forward for call in segment.body)
        return found

    def _again(self, call: Call) -> float:
        again = self.software.again
        if call.operator in PRODUCTS:
            return again.products
        return again.attention if "attention" in call.operator else again.rest
