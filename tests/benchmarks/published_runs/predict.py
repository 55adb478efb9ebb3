"""Step time and memory of a published layout: its plan is compiled and simulated, with what the run's software did
otherwise added to the prices of its instructions.

A step with many micro-batches is simulated with three and four times as many as stages; beyond these every further one
adds the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from titan.compiler.cost.compute import segment_seconds
from titan.compiler.cost.machine import Level, Machine, read_machine
from titan.compiler.cost.memory import communicator_count
from titan.compiler.cost.prices import Prices
from titan.compiler.cost.simulate import simulate
from titan.compiler.lower import lower
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.operators import TensorType
from titan.compiler.plan.program import Plan, Role
from titan.compiler.plan.segment import Call, Segment, parse_unit
from titan.compiler.plan.sizes import Sizes, block_profile

from tests.benchmarks.published_runs.layout import planned, shortened
from tests.benchmarks.published_runs.rows import Row
from tests.benchmarks.published_runs.runtime import Runtime, runtime

NORMS = ("rms_norm", "layer_norm")


@dataclass(frozen=True, slots=True)
class Predicted:
    """Seconds of the step; bytes of tensors, of the point and of the upper bound on the fullest rank; device bytes."""

    seconds: float
    tensors: int
    point: int
    upper: int
    device: int
    slack: float

    def held(self, kind: str) -> float:
        """What a source of this kind reports: tensors, what the allocator has reserved for them, or all of it."""
        if "allocated" in kind or "as reported" in kind:
            return self.tensors
        return self.tensors * (1 + self.slack) if "reserved" in kind else self.point


def predict(row: Row, figures: Mapping[str, float] | None = None, memory_only: bool = False) -> Predicted:
    """Raises layout.Refused where the row cannot be planned. `figures` replace those of the cluster."""
    spec, strategy = planned(row)
    traits = runtime(row)
    machine = _machine(row, read_machine(spec.cluster.model_dump()), traits, figures or {})
    few, more = 3 * strategy.pipeline, 4 * strategy.pipeline
    number = strategy.micro_batches
    counts = (number,) if number <= more else (few, more)
    plans = [traced(lower(*shortened(strategy, spec, count)), traits) for count in counts[:1]]
    seconds = 0.0
    if not memory_only:
        plans += [traced(lower(*shortened(strategy, spec, count)), traits) for count in counts[1:]]
        times = [simulate(plan, machine, prices=RunPrices(plan, machine, traits)).seconds for plan in plans]
        seconds = times[0] if len(times) == 1 else times[0] + (number - few) * (times[1] - times[0]) / (more - few)
        whole = strategy.data * strategy.micro_batch * number
        seconds *= row.number("global_batch_seqs") / whole
    tensors, point, upper = _memory(plans[0], machine, traits)
    return Predicted(seconds, tensors, point, upper, machine.memory, machine.figures["allocator_slack"])


def _machine(row: Row, found: Machine, traits: Runtime, figures: Mapping[str, float]) -> Machine:
    merged = {**found.figures, **figures}
    if traits.attention:
        merged["attention"] = merged[traits.attention]
    if not traits.norm:
        merged["norm_passes"] = 1.0
    merged["tensor_hidden"] = merged[traits.hidden]
    domain = 72 if row.text("gpu").startswith("GB") else found.devices_per_node
    bandwidth = found.memory_bandwidth / found.figures["memory"] * merged["memory"]
    shares = {"intra": merged["intra"], "inter": merged["unstated_inter" if traits.unstated_network else "inter"]}
    levels = {
        name: Level(
            getattr(found, name).bandwidth / found.figures[name] * share,
            merged.get(f"{name}_latency", getattr(found, name).latency),
        )
        for name, share in shares.items()
    }
    return replace(
        found, figures=merged, devices_per_node=max(domain, 1), memory_bandwidth=bandwidth, intra=levels["intra"],
        inter=levels["inter"],
    )  # fmt: skip


def traced(plan: Plan, traits: Runtime) -> Plan:
    """The plan with attention that forms its scores, where the software had no fused one."""
    if traits.attention:
        return plan
    return replace(plan, segments=tuple(_scored(s, traits.scores_again) for s in plan.segments))


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


class RunPrices(Prices):
    """Prices of a plan as the run's software executes it."""

    def __init__(self, plan: Plan, machine: Machine, traits: Runtime) -> None:
        super().__init__(plan, machine)
        self.traits = traits
        self._near: dict[int, float] = {}

    def price(self, role: Role, instruction: Instruction) -> int:
        found = super().price(role, instruction)
        if instruction.opcode == "reduce_grad":
            passes = 2 if self.traits.whole_sum and instruction.attribute("mode") == "reduce_scatter" else 1
            return found * passes * self.traits.gradient_bytes // 4
        if instruction.row.kind == "transfer" and self.traits.scattered:
            return found // self.plan.mesh.size("tensor")
        if instruction.row.kind == "collective" and instruction.group.startswith("tensor"):
            return round(found * (1 - self.machine.figures["tensor_hidden"]))
        if instruction.unit and instruction.opcode in ("backward", "backward_input"):
            name, layer = parse_unit(instruction.unit)
            if layer is not None and self.traits.again and name.endswith("s0"):
                found += round(self.traits.again * self.traits.layers_again * self._collectives(role))
        return found

    def _collectives(self, role: Role) -> float:
        """Nanoseconds of the collectives of one layer's forward."""
        if role.pipeline not in self._near:
            blocks = [b for b in role.blocks if b.name.startswith("F.")]
            layers = sum(len(held) for held in role.layers)
            total = sum(self.price(role, i) for b in blocks for i in b.instructions if i.row.kind == "collective")
            self._near[role.pipeline] = total / max(layers, 1)
        return self._near[role.pipeline]

    def _unit_seconds(self, opcode: str, name: str, tier: str) -> float:
        found = super()._unit_seconds(opcode, name, tier)
        segment = self.plan.segment_table[name]
        repeated = any(p.startswith(".") for p in segment.parameters)
        again = self.traits.again * self.traits.layers_again
        if opcode in ("backward", "backward_input") and repeated:
            found += again * self._segments[name].forward
            if self.traits.scores_again:
                found += self._attention(segment)
        return found

    def _attention(self, segment: Segment) -> float:
        body = tuple(c for c in segment.body if c.operator.startswith("attention"))
        return segment_seconds(self.machine, replace(segment, body=body)).forward


def _memory(plan: Plan, machine: Machine, traits: Runtime) -> tuple[int, int, int]:
    """(tensors, point, upper bound) of the rank that holds most."""
    sizes, worst = Sizes(plan), (0, 0, 0)
    for role in plan.roles:
        buffers = sum(b.bytes // (2 if b.kind == "gradients" and traits.narrow_gradients else 1) for b in role.buffers)
        tensors = buffers + live_activations(plan, role, sizes, traits)
        communicators = round(communicator_count(plan, role) * machine.figures["communicator_bytes"])
        point = round(tensors * (1 + machine.figures["allocator_slack"])) + communicators + machine.reserved
        upper = round(tensors * (1 + machine.figures["allocator_slack_upper"]) + 1.5 * communicators) + machine.reserved
        worst = max(worst, (tensors, point, upper))
    return worst


def live_activations(plan: Plan, role: Role, sizes: Sizes, traits: Runtime) -> int:
    """Peak of live registers and workspace, where the software keeps less of a layer and makes it again."""
    profiles = {}
    for block in role.blocks:
        found = block_profile(block, sizes, role)
        dropped = _dropped(plan, role, block.name, sizes, traits)
        layers, total = len(dropped), sum(dropped)
        one = max(dropped, default=0)
        if block.name.startswith("F."):
            found = replace(found, change=found.change - total, height=found.height - total + (one if layers else 0))
        elif block.name[0] in "BI":
            found = replace(found, change=found.change + total, height=found.height + one)
        profiles[block.name] = found
    live = peak = 0
    for call in role.order("train"):
        profile = profiles[call.block]
        peak = max(peak, live + profile.height + profile.workspace)
        live += profile.change
    return peak


def _dropped(plan: Plan, role: Role, block: str, sizes: Sizes, traits: Runtime) -> list[int]:
    """Bytes that are not kept of each layer of a block's chunk: all but the layer's input where it is run again."""
    share = traits.again * traits.layers_again
    phase, _, rest = block.partition(".")
    table = role.block_table
    forward = table.get(f"F.{rest.partition('.')[0]}")
    if not share or phase not in "FBI" or forward is None:
        return []
    freed = {n for i in forward.instructions if i.opcode == "free" for n in i.reads}
    held: dict[int, int] = {}
    for i in forward.instructions:
        for name in i.writes:
            base = name.rstrip("?").partition(":")[0]
            head, mark, layer = base.rpartition(".l")
            if name not in freed and not name.endswith("?") and mark and layer.isdigit() and head != "x":
                held[int(layer)] = held.get(int(layer), 0) + sizes.register(name)
    inside = {layer for chunk in role.layers for layer in chunk}
    return [round(share * size) for layer, size in held.items() if layer in inside]
