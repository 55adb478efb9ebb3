"""Closed forms for a candidate layout: step time and memory without building a plan.

They serve to prune and to rank; finalists are compiled and simulated. Shapes are those of one decoder layer per rank;
identical layers are priced once per (tensor, context, sequence_parallel, context_form, micro_batch, experts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from math import ceil, inf
from operator import attrgetter
from typing import Any

from titan.compiler.cost.compute import moved_seconds
from titan.compiler.cost.cut import Cut
from titan.compiler.cost.estimate_memory import Activations, MemoryForms
from titan.compiler.cost.gathers import gather_seconds
from titan.compiler.cost.layer import LayerCost
from titan.compiler.cost.machine import Machine
from titan.compiler.cost.network import strided, transfer_seconds
from titan.compiler.cost.offload import activation_seconds, state_seconds
from titan.compiler.cost.shape import Shape
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.segment import TIERS
from titan.compiler.schedules.order import Times
from titan.compiler.schedules.registry import schedule_row
from titan.compiler.schedules.timetable import Durations
from titan.compiler.strategy import Strategy, expert_parts

# Of the time for which layers wait for collectives, what a pair of a forward and a backward hides: in simulated plans
# mostly 0.3 to 0.55 of it, less with few micro-batches. Rather too little: what is said to be faster is to be so.
HIDDEN = 0.25


@dataclass(frozen=True, slots=True)
class Estimate:
    """Step seconds (infinite where memory made them idle to know), peak bytes of the fullest rank, layers of the
    largest stage, and of the seconds those in which 1F1B or GPipe fills and drains its stages."""

    seconds: float
    memory: int
    stage: int
    fill: float = 0.0


# what ways to save memory leave as it is
_LAYOUT = attrgetter(
    "pipeline", "data", "context", "tensor", "sequence_parallel", "context_form", "context_heads", "context_order",
    "micro_batch", "loss_rows", "expert", "expert_tensor", "schedule", "wished_chunks", "stages", "offload",
    "offloaded",
)  # fmt: skip


@dataclass(slots=True)
class _Layout:
    """What of a strategy the ways to save memory have in common: costs of a layer, of the head and of one that keeps
    its logits, layers that ranks work on per micro-batch, copies of the model, micro-batches, bytes of communicators;
    and what is known of its bodies, by recompute and by whether they keep logits though the strategy does not."""

    layer: LayerCost
    head: LayerCost
    keeping: LayerCost
    loads: list[float]
    copies: int
    micro_batches: int
    communicators: int
    bodies: dict[tuple[str, bool], _Body] = field(default_factory=dict)


@dataclass(slots=True)
class _Body:
    """What of a layout with a recompute the ways to keep its state have in common: layers of the largest stage; once
    they were asked for, seconds of the pipeline and of them those of the fill, and bytes of activations by layers ahead
    that come from the host."""

    layout: _Layout
    head: LayerCost
    stage: int
    seconds: tuple[float, float] | None = None
    activations: dict[int, tuple[Activations, ...]] = field(default_factory=dict)


class Estimator(MemoryForms):
    """Prices candidates of one model on one machine."""

    def __init__(self, machine: Machine, shape: Shape, global_batch: int) -> None:
        super().__init__(machine, shape, global_batch)
        self._layouts: dict[tuple[Any, ...], _Layout] = {}
        self._exchanges: dict[tuple[Any, ...], list[tuple[float, int, int]]] = {}
        self._links: dict[tuple[int, int, int], tuple[float, float]] = {}

    def bottleneck(self, pipeline: int, layer: float, head: float) -> int:
        """Layers of the fullest stage in an even split where the head weighs `head / layer` layers of the last one."""
        layers = self.shape.layers
        if pipeline == 1:
            return layers
        lost = head / layer
        most = -(-layers // pipeline)
        while (pipeline - 1) * most + max(int(most - lost), 1) < layers:
            most += 1
        return most

    def estimate(self, s: Strategy, limit: float = inf) -> Estimate:
        """Closed forms for a strategy: 1F1B or GPipe fill and drain, gradients summed at the end of the step. Beyond
        `limit` bytes the time is not worked out."""
        if s.recompute == "adaptive":
            return self._adaptive(s, limit)
        return self._estimate(s, self._body(s, s.recompute), limit)

    def alike(self, s: Strategy, limit: float = inf) -> Callable[[Mapping[str, Any]], tuple[Strategy, Estimate]]:
        """A strategy with a way to keep its state (`zero`, `shard`, `reduce`, `gather`, `prefetch`), and its closed
        forms; what none of these changes is worked out once for all ways that are asked for."""
        body = None if s.recompute == "adaptive" else self._body(s, s.recompute)

        def priced(way: Mapping[str, Any]) -> tuple[Strategy, Estimate]:
            found = s.but(**way)
            return found, self._estimate(found, body, limit) if body else self._adaptive(found, limit)

        return priced

    def _body(self, s: Strategy, recompute: str, kept_logits: bool = False) -> _Body:
        layout = self._layout(s)
        head = layout.keeping if kept_logits else layout.head
        key = (recompute, head is layout.head)
        found = layout.bodies.get(key)
        if found is None:
            stage = self._largest(s, layout.loads, layout.layer, head, recompute)
            found = layout.bodies[key] = _Body(layout, head, stage)
        return found

    def _layout(self, s: Strategy) -> _Layout:
        key = _LAYOUT(s)
        found = self._layouts.get(key)
        if found is None:
            cut = self.cut(s)
            found = self._layouts[key] = _Layout(
                self.layer(cut), self.head(cut), self.head(self.kept_logits(s)),
                self._rank_layers(s), schedule_row(s.schedule).copies, self.global_batch // (s.data * s.micro_batch),
                round(self._communicators(s) * self.machine.figures["communicator_bytes"]),
            )  # fmt: skip
        return found

    def _largest(self, s: Strategy, loads: list[float], layer: LayerCost, head: LayerCost, recompute: str) -> int:
        """Layers of the largest stage."""
        if loads:
            return ceil(max(loads))
        ends = (head.forward + head.backward) / schedule_row(s.schedule).copies
        return self.bottleneck(s.pipeline, layer.forward + layer.backward + layer.rebuilt(recompute), ends)

    def _estimate(self, s: Strategy, body: _Body, limit: float) -> Estimate:
        layout, stage, layer = body.layout, body.stage, body.layout.layer
        ahead = s.prefetch if s.offload != "none" else 0
        kept = body.activations.get(ahead)
        if kept is None:
            kept = body.activations[ahead] = self._activations(s, stage, layout.micro_batches, layer, body.head)
        memory = round(self._peak(s, kept) * self.slack) + layout.communicators + self.machine.reserved
        if memory > limit:
            return Estimate(inf, memory, stage)
        pipeline, fill = self._seconds(s, body, s.recompute)
        ends_held = self._most_ends(s)
        passes, held = (stage * layer.forward, stage * layer.backward), stage * layout.copies
        more = self._step_end(s, self._weights(s, held, ends_held), *passes)
        more += self._experts_end(s, held, passes[0])
        more += layout.micro_batches * self._sharded_seconds(s, layer, held, ends_held)
        more += layout.micro_batches * activation_seconds(self.machine, s, layer, stage)
        return Estimate(pipeline + self._crowd(s) * more, memory, stage, fill)

    def bound(self, s: Strategy, recompute: str = "none", fill: float = 1.0) -> float:
        """Seconds that no way of saving memory gets below: the body of a step with this recompute, logits kept, and
        with a share of the fill."""
        seconds, filling = self._seconds(s, self._body(s, recompute, kept_logits=True), recompute)
        return seconds - (1 - fill) * filling

    def open_bound(self, s: Strategy, recompute: str = "none", fill: float = 1.0, exchange: float = 0.0) -> float:
        """Seconds that no way of sharing experts gets below either with an exchange that a pass of a mean layer waits
        for at least so long."""
        cut, loads = self.kept_logits(s, open_experts=True), self._rank_layers(s)
        layer, head = self.waiting(cut, exchange), self.head(cut)
        # cheaper layers would make a head weigh more of them
        stage = ceil(max(loads)) if loads else -(-self.shape.layers // s.pipeline)
        seconds, filling = self._pipeline_part(s, stage, loads, layer, head, recompute)
        return self._crowded(s, seconds, layer, head) - (1 - fill) * filling

    def exchanges(self, s: Strategy, ways: tuple[tuple[int, int], ...]) -> list[tuple[float, int, int]]:
        """Ways to share experts (`expert`, `expert_tensor`), each after the seconds in which a pass of a mean layer
        waits for its exchange, the shortest first."""
        cut = self.kept_logits(s, open_experts=True)
        key = (cut.stream, cut.context, cut.tensor, ways)
        found = self._exchanges.get(key)
        if found is None:
            found = self._exchanges[key] = sorted((self._mean_exchange(cut, *way), *way) for way in ways)
        return found

    def _mean_exchange(self, cut: Cut, expert: int, width: int) -> float:
        shared = cut._replace(experts=(*expert_parts(expert, width, cut.context, cut.tensor), width))
        routed = (kind for kind in self.shape.mixtures if kind.experts)
        return sum(kind.count * self.exchange_seconds(shared, kind) for kind in routed) / self.shape.layers

    def floors(self, s: Strategy, most: int, fills: Iterable[float]) -> list[float]:
        """Seconds that no micro-batch of up to `most` sequences gets below on the strategy's mesh: what a sequence
        takes, for all of them and for each of some fills (in sequences) on every other stage."""
        larger = 4 ** ((most - 1).bit_length() + 1 >> 1)  # few sizes are priced for all meshes
        layer = self.layer(self.kept_logits(s, open_experts=True)._replace(micro_batch=larger))
        one, n, stages = layer.forward + layer.backward, self.shape.layers, s.pipeline
        return [(self.global_batch // s.data + (stages - 1) * fill) * one / larger * n / stages for fill in fills]

    def pipeline_part(self, s: Strategy) -> float:
        """Seconds of the body of a step in closed form, for known stages: forwards, backwards, and waiting for them."""
        return self._seconds(s, self._body(s, s.recompute), s.recompute)[0]

    def _seconds(self, s: Strategy, body: _Body, recompute: str) -> tuple[float, float]:
        """Of the body of a step, and of them those of the fill."""
        layout, found = body.layout, body.seconds
        if found is None:
            found = self._pipeline_part(s, body.stage, layout.loads, layout.layer, body.head, recompute)
            body.seconds = found
        return self._crowded(s, found[0], layout.layer, body.head), found[1]

    def _rank_layers(self, s: Strategy) -> list[float]:
        """Layers that each rank works on per micro-batch; nothing while the stages are unknown."""
        copies = schedule_row(s.schedule).copies
        return [sum(s.stages[c] for c in rank.stages) / copies for rank in self._held(s)] if s.stages else []

    def _pipeline_part(
        self, s: Strategy, stage: int, loads: list[float], layer: LayerCost, head: LayerCost, recompute: str
    ) -> tuple[float, float]:
        """Seconds where ranks share no cores, and of them those of the fill."""
        micro_batches = self.global_batch // (s.data * s.micro_batch)
        one = layer.forward + layer.backward + layer.rebuilt(recompute)
        ends = head.forward + head.backward
        if s.pipeline == 1:
            return micro_batches * (stage * one + ends), 0.0
        last = loads[[r for r, rank in enumerate(self._held(s)) if rank.lasts][-1]] if loads else 1
        slowest = max(stage * one, last * one + ends / schedule_row(s.schedule).copies)
        forward = (self.shape.layers * layer.forward + head.forward) / s.pipeline
        weight = (self.shape.layers * layer.backward + head.backward) / s.pipeline / 2
        inputs = (self.shape.layers * one + ends) / s.pipeline - forward - weight
        times = forward, inputs, weight
        body = self._pipeline_seconds(s, micro_batches, slowest, times, layer.entry)
        fills = schedule_row(s.schedule).fills and self._crowd(s) == 1.0
        fill = (s.pipeline - 1) * (forward + inputs + weight) if fills else 0.0
        return body, fill

    def crowded(self, s: Strategy, body: float) -> float:
        """Seconds of the body of a step where ranks share cores: no less than the work of all on the cores that there
        are. While some wait, others are faster: a bubble costs little then."""
        cut = self.cut(s)
        return self._crowded(s, body, self.layer(cut), self.head(cut))

    def _crowded(self, s: Strategy, body: float, layer: LayerCost, head: LayerCost) -> float:
        if not self.machine.cores or self._crowd(s) == 1.0:
            return body
        one = layer.forward + layer.backward + layer.rebuilt(s.recompute)
        micro_batches = self.global_batch // (s.data * s.micro_batch)
        busy = micro_batches * (self.shape.layers * one + head.forward + head.backward) / s.pipeline
        return max(body, self._crowd(s) * busy)

    def _crowd(self, s: Strategy) -> float:
        """Ranks of a node for each of its cores, where they share them."""
        ranks = min(s.world_size, self.machine.devices_per_node)
        return max(ranks / self.machine.cores, 1.0) if self.machine.cores else 1.0

    def durations(self, s: Strategy) -> Durations:
        """Seconds of the phases of every chunk, all copies, for known stages. A backward is half to inputs, where what
        is rebuilt counts too, and half to weights; a transfer takes the slower kind of link that it meets."""
        cut = self.cut(s)
        layer, head = self.layer(cut), self.head(cut)
        phases = (layer.forward, layer.backward / 2 + layer.rebuilt(s.recompute), layer.backward / 2)
        last = (head.forward, head.backward / 2, head.backward / 2)
        one = [[n * phase for n in s.stages] for phase in phases]
        for times, end in zip(one, last, strict=True):
            times[-1] += end
        copies = schedule_row(s.schedule).copies
        crosses = s.pipeline * s.data * s.context * s.tensor > self.machine.devices_per_node
        transfer = transfer_seconds(self.machine, crosses, layer.entry)
        forward, inputs, weights = (tuple(times) * copies for times in one)
        return Durations(forward, inputs, weights, transfer, self._pair(layer, s.recompute))

    def _pair(self, layer: LayerCost, recompute: str) -> float:
        """Seconds of a pair of a forward and a backward as a share of both: each computes while the other waits. Of
        ranks that share cores it is not known."""
        if self.machine.cores:
            return 1.0
        whole, waits = layer.forward + layer.backward + layer.rebuilt(recompute), sum(layer.traffic)
        return 1 - HIDDEN * min(waits, whole - waits) / whole

    def _adaptive(self, s: Strategy, limit: float) -> Estimate:
        """The first tier that fits, for all layers."""
        found = [self.estimate(replace(s, recompute=tier), limit) for tier in TIERS]
        return next((e for e in found if e.memory <= limit / 1.1), found[-1])

    def _pipeline_seconds(
        self, s: Strategy, micro_batches: int, slowest: float, times: tuple[float, float, float], size: int
    ) -> float:
        """Fill and drain, and the steady state: the slowest rank, or a cycle of 1F1B. Over n consecutive stages
        n micro-batches are under way, so n steps take at least the stages' times and their links there and back.
        `times` are those of a mean rank: forward, backward to inputs and to weights."""
        link, links = self._transfers(s.pipeline, s.data * s.context * s.tensor, size)
        row = schedule_row(s.schedule)
        if not row.fills:
            phases = Times(*times)
            steady = slowest * row.steady(phases) / phases.total
            return micro_batches * steady + row.bubble(s.pipeline, phases, s.chunks) + s.chunks * links
        mean = times[0] + (times[1] + times[2])
        whole = s.pipeline * mean
        cycle = max(mean + links / s.pipeline, mean + link) if micro_batches >= s.pipeline else 0.0
        return whole + links + (micro_batches - 1) * max(slowest, cycle)

    def _transfers(self, ranks: int, stride: int, size: int) -> tuple[float, float]:
        """Seconds of the slowest transfer of `size` bytes between neighbours of so many pipeline ranks that stand
        `stride` apart, and of all of them, there and back."""
        found = self._links.get((ranks, stride, size))
        if found is None:
            slow = min(-(-ranks * stride // self.machine.devices_per_node) - 1, ranks - 1)
            near, far = transfer_seconds(self.machine, False, size), transfer_seconds(self.machine, True, size)
            found = far if slow else near, 2 * (slow * far + (ranks - 1 - slow) * near)
            self._links[ranks, stride, size] = found
        return found

    def _sharded_seconds(self, s: Strategy, layer: LayerCost, layers: float, ends: int) -> float:
        """Seconds of gathers and scatters of one micro-batch that its compute does not hide: what is longer than the
        layer it runs beside, and the first gather of each pass."""
        if self._shards(s) == 1 or s.zero < 2:
            return 0.0
        near = strided(s.tensor, self._shards(s), self.machine.devices_per_node)
        weights, end = self.shape.layer_held(s.tensor), self.shape.end_parameters / s.tensor
        found = 0.0
        if s.zero == 3 and s.gather == "each":
            one = self.collective("all_gather", near, weights * self.size)
            first = self.collective("all_gather", near, end * self.size) if ends else one
            one += self.experts_collective(s, "all_gather", self.size)
            for compute in (layer.forward, layer.backward):
                found += first + layers * self.exposed(one, compute if s.prefetch else 0.0)
        if "g" in s.sharded:
            one = self.collective("reduce_scatter", near, weights * self.statistic)
            last = self.collective("reduce_scatter", near, end * self.statistic) if ends else one
            one += self.experts_collective(s, "reduce_scatter", self.statistic)
            found += last + layers * self.exposed(one, layer.backward)
        return found

    def experts_collective(self, s: Strategy, opcode: str, size: int) -> float:
        """Seconds of a gather or sum of one layer's experts over the shards of those that hold the same ones."""
        data, context, _ = s.expert_parts
        shards = self._shards(s) // (data * context)
        if shards < 2 or not self.shape.expert_parameters:
            return 0.0
        far = strided(s.tensor * context * data, shards, self.machine.devices_per_node)
        return self.collective(opcode, far, self._experts_held(s) * size)

    def _step_end(self, s: Strategy, held: float, forward: float, backward: float) -> float:
        """Gradient sum, norm and optimizer, gather of the parameters with ZeRO. The sum runs under the last backward,
        but for its last bucket."""
        replicas, shards = s.data * s.context, self._shards(s)
        far = strided(s.tensor, replicas, self.machine.devices_per_node)
        near = strided(s.tensor, min(shards, replicas), self.machine.devices_per_node)
        summed = 0.0
        if "g" not in s.sharded:
            summed = self.collective("reduce_scatter", near, held * self.statistic) if s.zero else 0.0
            summed += self.collective("all_reduce", far, held * self.statistic) if not s.zero else 0.0
        buckets = self.shape.layers / s.pipeline + 1
        own, seconds = held / shards, max(self.exposed(summed, backward), summed / buckets)
        if s.zero and shards < replicas:
            between = strided(s.tensor * shards, replicas // shards, self.machine.devices_per_node)
            seconds += self.collective("all_reduce", between, own * self.statistic)
        gather = self.collective("all_gather", near, held * self.size)
        seconds += gather_seconds(s, gather, self.exposed(gather, forward), buckets)
        return seconds + self._update(s, own, held)

    def _update(self, s: Strategy, own: float, held: float) -> float:
        """The optimizer on `own` parameters of `held`, with the copies of state that it does not hide."""
        update = moved_seconds(self.machine, own * (10 * self.statistic + self.size) + held * self.statistic)
        return update + state_seconds(self.machine, s, own * self._state, update)

    def _experts_end(self, s: Strategy, layers: float, forward: float) -> float:
        """The same of experts: sums over the ranks that hold the same ones, and their update."""
        if not self.shape.expert_parameters:
            return 0.0
        data, context, _ = s.expert_parts
        held = self._experts_held(s) * layers
        replicas = s.data * s.context // (data * context)
        far = strided(s.tensor * context * data, replicas, self.machine.devices_per_node)
        seconds = 0.0
        if "g" not in s.sharded:
            opcode = "reduce_scatter" if s.zero else "all_reduce"
            seconds += self.collective(opcode, far, held * self.statistic) / max(self.shape.layers / s.pipeline, 1)
        buckets = self.shape.layers / s.pipeline
        gather = self.collective("all_gather", far, held * self.size)
        seconds += gather_seconds(s, gather, self.exposed(gather, forward), buckets)
        own = held / (replicas if s.zero else 1)
        return seconds + self._update(s, own, held)
