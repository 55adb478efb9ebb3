"""Closed forms for a candidate layout: step time and memory without building a plan.

They serve to prune and to rank; finalists are compiled and simulated. Shapes are those of one decoder layer per rank;
identical layers are priced once per (tensor, context, sequence_parallel, context_form, micro_batch).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, inf
from typing import Any, NamedTuple

from titan.compiler.cost.compute import attention_seconds, fullest, gemm_seconds, moved_seconds
from titan.compiler.cost.machine import Machine
from titan.compiler.cost.memory import upper_bound
from titan.compiler.cost.network import Placement, bases, collective_seconds, place, transfer_seconds
from titan.compiler.plan.operators import DTYPE_BYTES
from titan.compiler.plan.segment import TIERS
from titan.compiler.schedules.order import Times
from titan.compiler.schedules.registry import SCHEDULES
from titan.compiler.schedules.timetable import Durations
from titan.compiler.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder in numbers, read once from a model's plain dictionary. Per-layer figures are means over the layers."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: float
    gated: bool
    vocab: int
    tied: bool
    dtype: str
    sequence: int
    layer_parameters: float
    end_parameters: int  # embedding with positions
    weights: tuple[float, ...]  # of every layer relative to the mean one, by its matrices


class Cut(NamedTuple):
    """What decides the price of a layer."""

    tensor: int
    context: int
    sequence_parallel: bool
    context_form: str
    micro_batch: int
    context_heads: int = 1
    zigzag: bool = True
    loss_rows: int = 0

    @property
    def ring(self) -> int:
        """Ranks of a ring; 1 without one."""
        return self.context // self.context_heads if self.context_form == "ring" else 1

    @property
    def exchange(self) -> int:
        """Ranks that exchange heads."""
        return {"heads": self.context, "ring": self.context_heads}.get(self.context_form, 1)


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Seconds forward and backward, communication included; bytes kept until backward, and of the layer's input.

    For the recompute tiers `selective` and `full`: bytes stored, seconds of a rebuild.
    """

    forward: float
    backward: float
    kept: int
    entry: int
    selective: tuple[int, float] = (0, 0.0)
    full: tuple[int, float] = (0, 0.0)

    def stored(self, tier: str) -> int:
        return {"selective": self.selective[0], "full": self.full[0]}.get(tier, self.kept)

    def rebuilt(self, tier: str) -> float:
        return {"selective": self.selective[1], "full": self.full[1]}.get(tier, 0.0)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Step seconds (infinite where memory made them idle to know), peak bytes (point and upper bound) of the fullest
    rank, and layers of the largest stage."""

    seconds: float
    memory: int
    memory_upper: int
    stage: int


def read_shape(model: Mapping[str, Any], sequence: int, dtype: str) -> Shape:
    """`model` is the plain dictionary of a spec's model, `dtype` the plan dtype of activations."""
    attention = model["attention"] or {"heads": 0, "kv_heads": 0, "head_dim": 0}
    groups, hidden = model["layers"], model["hidden"]
    layers = sum(g["count"] for g in groups)
    ffn = sum(g["count"] * g["block"]["ffn"] for g in groups) / layers
    gated = groups[0]["block"]["activation"] == "swiglu"
    width = (attention["heads"] + attention["kv_heads"]) * attention["head_dim"]
    number = 3 if gated else 2
    parameters = 2.0 * hidden * width + number * hidden * ffn
    weights = [(2.0 * hidden * width + number * hidden * g["block"]["ffn"]) / parameters for g in groups]
    return Shape(
        hidden, layers, attention["heads"], attention["kv_heads"], attention["head_dim"], ffn, gated,
        model["vocab"], model["tied"], dtype, sequence,
        parameters,
        (model["vocab"] + (model["max_positions"] if model["positions"] == "learned" else 0)) * hidden,
        tuple(w for w, g in zip(weights, groups, strict=True) for _ in range(g["count"])),
    )  # fmt: skip


@lru_cache(maxsize=4096)
def strided(stride: int, number: int, devices_per_node: int) -> Placement:
    """Placement of groups of `number` ranks that stand `stride` apart."""
    outside = ((1, stride), (stride * number, devices_per_node))
    return place(((stride, number),), bases(0, outside, devices_per_node), devices_per_node)


class Held(NamedTuple):
    """What a pipeline rank holds: the stages of its chunks, and how many of these are a model's first or last."""

    stages: tuple[int, ...]
    firsts: int
    lasts: int


@lru_cache(maxsize=4096)
def held_by_rank(schedule: str, ranks: int, chunks: int) -> tuple[Held, ...]:
    """What every rank holds under a schedule."""
    row = SCHEDULES[schedule]
    placement = row.place(ranks, chunks)
    number = len(placement) // row.copies
    found = []
    for rank in range(ranks):
        stages = tuple(c % number for c, r in enumerate(placement) if r == rank)
        found.append(Held(stages, stages.count(0), stages.count(number - 1)))
    return tuple(found)


class Estimator:
    """Prices candidates of one model on one machine; remembers what layers and ends cost."""

    def __init__(self, machine: Machine, shape: Shape, global_batch: int) -> None:
        self.machine, self.shape, self.global_batch = machine, shape, global_batch
        self.size = DTYPE_BYTES[shape.dtype]
        self.statistic = 8 if shape.dtype == "f64" else 4  # bytes of gradients and optimizer state
        self._layers: dict[Cut, LayerCost] = {}
        self._heads: dict[Cut, LayerCost] = {}

    def layer(self, cut: Cut) -> LayerCost:
        if cut not in self._layers:
            self._layers[cut] = self._layer(cut)
        return self._layers[cut]

    def head(self, cut: Cut) -> LayerCost:
        """Final norm, output head and loss; `kept` are logits and their gradient."""
        if cut not in self._heads:
            self._heads[cut] = self._head(cut)
        return self._heads[cut]

    def _layer(self, cut: Cut) -> LayerCost:
        shape, size, t = self.shape, self.size, cut.tensor
        tokens = cut.micro_batch * shape.sequence // cut.context
        stream = tokens // t if cut.sequence_parallel else tokens
        queries = shape.heads * shape.head_dim // t
        keys = max(shape.kv_heads // t, 1 if shape.kv_heads else 0) * shape.head_dim
        inner, up = round(shape.ffn / t), 2 if shape.gated else 1
        products = [(shape.hidden, queries), (shape.hidden, keys), (shape.hidden, keys), (queries, shape.hidden)]
        products += [(shape.hidden, inner)] * up + [(inner, shape.hidden)]
        forward, backward = self._products(tokens, [p for p in products if p[0] and p[1]])
        if queries:
            work = 2.0 * tokens * shape.sequence * queries  # two products, half of the scores visible
            if cut.context_form == "gathered" or not (cut.zigzag or cut.ring == 1):
                work *= fullest(shape.sequence // cut.context, shape.sequence)
            seen = shape.sequence // cut.ring
            attention = attention_seconds(self.machine, work, seen, shape.dtype)
            back_attention = attention_seconds(self.machine, 2.5 * work, seen, shape.dtype)
            forward, backward = forward + attention, backward + back_attention
        residual, turned, hidden = stream * shape.hidden, tokens * (queries + keys), tokens * inner
        forward += moved_seconds(self.machine, size * (10 * residual + 2 * turned + (up + 1) * hidden))
        backward += moved_seconds(self.machine, size * (14 * residual + 2 * turned + (2 * up + 1) * hidden))
        near, back = self._layer_traffic(cut, tokens, queries, keys)
        if cut.ring > 1 and queries:
            exposed = self._ring_exposed(cut, tokens * keys, attention, back_attention)
            near, back = near + exposed[0], back + exposed[1]
        gathered = tokens * shape.hidden
        whole_keys = keys * (cut.context if cut.context_form == "gathered" else 1)
        kept = 2 * residual + 2 * gathered + tokens * (2 * queries + 2 * whole_keys + (up + 1) * inner)
        summed = residual if t > 1 else 0  # what a sum over ranks has made is stored
        thrifty = 2 * residual + tokens * (2 * queries + 2 * whole_keys + up * inner)
        least = residual + summed + tokens * queries
        light = moved_seconds(self.machine, size * (4 * residual + (up + 1) * hidden))
        again = near / 2 if cut.sequence_parallel else 0.0
        heavy = forward - (attention if queries else 0.0) - self._products(tokens, [(inner, shape.hidden)])[0]
        selective, full = (thrifty * size, light + again), (least * size, heavy + again)
        return LayerCost(forward + near, backward + back, kept * size, residual * size, selective, full)

    def _products(self, tokens: int, products: list[tuple[int, int]]) -> tuple[float, float]:
        """Seconds forward, and backward to inputs and weights, of linear layers (inner, outer width)."""
        forward = backward = 0.0
        for k, n in products:
            forward += gemm_seconds(self.machine, tokens, n, k, self.shape.dtype)
            backward += gemm_seconds(self.machine, tokens, k, n, self.shape.dtype)
            backward += gemm_seconds(self.machine, n, k, tokens, self.shape.dtype, 8)
        return forward, backward

    def _layer_traffic(self, cut: Cut, tokens: int, queries: int, keys: int) -> tuple[float, float]:
        """Seconds of collectives forward and backward: tensor regions, then the context form."""
        near = strided(1, cut.tensor, self.machine.devices_per_node)
        whole = float(tokens * self.shape.hidden * self.size)
        if cut.sequence_parallel:
            once = 2 * (self._collective("all_gather", near, whole) + self._collective("reduce_scatter", near, whole))
        else:
            once = 2 * self._collective("all_reduce", near, whole)
        if cut.context == 1:
            return once, once
        far = strided(cut.tensor, cut.context, self.machine.devices_per_node)
        if cut.exchange > 1:
            far = strided(cut.tensor, cut.exchange, self.machine.devices_per_node)
            moved = sum(
                self._collective("all_to_all", far, tokens * w * self.size) for w in (queries, queries, keys, keys)
            )
            return once + moved, once + moved
        if cut.context_form == "ring":
            return once, once
        gathered = float(tokens * cut.context * keys * self.size)
        return (
            once + 2 * self._collective("all_gather", far, gathered),
            once + 2 * self._collective("reduce_scatter", far, gathered),
        )

    def _ring_exposed(self, cut: Cut, elements: int, forward: float, backward: float) -> tuple[float, float]:
        """What of a ring's transfers its blocks do not hide: each step passes keys and values on while it computes;
        backward their gradients too, in float32."""
        far = strided(cut.tensor * cut.context_heads, cut.ring, self.machine.devices_per_node)
        statistic = 8 if self.shape.dtype == "f64" else 4
        found = []
        for compute, size in ((forward, self.size), (backward, self.size + statistic)):
            moved = 2 * transfer_seconds(self.machine, far.nodes > 1, elements * size)
            found.append((cut.ring - 1) * max(moved - compute / cut.ring, 0.0))
        return found[0], found[1]

    def cut(self, s: Strategy) -> Cut:
        return Cut(
            s.tensor, s.context, s.sequence_parallel, s.context_form, s.micro_batch, s.context_heads,
            s.context_order == "zigzag", s.loss_rows,
        )  # fmt: skip

    def _collective(self, opcode: str, placement: Placement, whole: float) -> float:
        return collective_seconds(self.machine, opcode, placement, whole)

    def _head(self, cut: Cut) -> LayerCost:
        shape, size = self.shape, self.size
        tokens = cut.micro_batch * shape.sequence // cut.context
        columns = -(-shape.vocab // cut.tensor)
        forward, backward = self._products(tokens, [(shape.hidden, columns)])
        logits = tokens * columns * size
        near = strided(1, cut.tensor, self.machine.devices_per_node)
        traffic = self._collective("all_gather", near, float(tokens * shape.hidden * size))
        again = forward if cut.loss_rows else 0.0  # the maximum's own pass, and the logits formed again in backward
        return LayerCost(
            forward + again + traffic + moved_seconds(self.machine, 3.0 * logits),
            backward + again + traffic + moved_seconds(self.machine, 3.0 * logits),
            2 * (min(cut.loss_rows, tokens) * columns * size if cut.loss_rows else logits),
            tokens * shape.hidden * size,
        )

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
        cut = self.cut(s)
        layer, head = self.layer(cut), self.head(cut)
        micro_batches = self.global_batch // (s.data * s.micro_batch)
        if s.recompute == "adaptive":
            return self._adaptive(s, limit)
        one = layer.forward + layer.backward + layer.rebuilt(s.recompute)
        ends = head.forward + head.backward
        copies, loads = SCHEDULES[s.schedule].copies, self._rank_layers(s)
        stage = ceil(max(loads)) if loads else self.bottleneck(s.pipeline, one, ends / copies)
        tensors = self._peak(s, stage, micro_batches, layer, head)
        communicators = round(self._communicators(s) * self.machine.figures["communicator_bytes"])
        point = round(tensors * (1 + self.machine.figures["allocator_slack"])) + communicators + self.machine.reserved
        seconds = inf
        if point <= limit:
            seconds = self._pipeline_part(s, stage, loads)
            ends_held = max(map(self._ends, self._held(s)))
            hidden = stage * layer.backward
            seconds += self._step_end(s, self._weights(s, stage * copies, ends_held), hidden)
            seconds += micro_batches * self._sharded_seconds(s, layer, stage * copies, ends_held)
        return Estimate(seconds, point, upper_bound(self.machine, tensors, communicators), stage)

    def pipeline_part(self, s: Strategy) -> float:
        """Seconds of the body of a step in closed form, for known stages: forwards, backwards, and waiting for them."""
        loads = self._rank_layers(s)
        return self._pipeline_part(s, ceil(max(loads)), loads)

    def _rank_layers(self, s: Strategy) -> list[float]:
        """Layers that each rank works on per micro-batch; nothing while the stages are unknown."""
        copies = SCHEDULES[s.schedule].copies
        return [sum(s.stages[c] for c in rank.stages) / copies for rank in self._held(s)] if s.stages else []

    def _pipeline_part(self, s: Strategy, stage: int, loads: list[float]) -> float:
        layer, head = self.layer(self.cut(s)), self.head(self.cut(s))
        micro_batches = self.global_batch // (s.data * s.micro_batch)
        one = layer.forward + layer.backward + layer.rebuilt(s.recompute)
        ends = head.forward + head.backward
        at_end = [r for r, rank in enumerate(self._held(s)) if rank.lasts][-1]
        last = loads[at_end] if loads else 1
        slowest = max(stage * one, last * one + ends / SCHEDULES[s.schedule].copies)
        slowest = slowest if s.pipeline > 1 else stage * one + ends
        forward = (self.shape.layers * layer.forward + head.forward) / s.pipeline
        weight = (self.shape.layers * layer.backward + head.backward) / s.pipeline / 2
        times = Times(forward, (self.shape.layers * one + ends) / s.pipeline - forward - weight, weight)
        return self._pipeline_seconds(s, micro_batches, slowest, times, layer.entry)

    def durations(self, s: Strategy) -> Durations:
        """Seconds of the phases of every chunk, all copies, for known stages. A backward is half to inputs, where what
        is rebuilt counts too, and half to weights; a transfer takes the slower kind of link that it meets."""
        layer, head = self.layer(self.cut(s)), self.head(self.cut(s))
        phases = (layer.forward, layer.backward / 2 + layer.rebuilt(s.recompute), layer.backward / 2)
        last = (head.forward, head.backward / 2, head.backward / 2)
        one = [[n * phase for n in s.stages] for phase in phases]
        for times, end in zip(one, last, strict=True):
            times[-1] += end
        copies = SCHEDULES[s.schedule].copies
        crosses = s.pipeline * s.data * s.context * s.tensor > self.machine.devices_per_node
        transfer = transfer_seconds(self.machine, crosses, layer.entry)
        forward, inputs, weights = (tuple(times) * copies for times in one)
        return Durations(forward, inputs, weights, transfer)

    def room(self, s: Strategy, limit: int) -> tuple[float, ...]:
        """Bytes that each rank has for activations, for known stages."""
        fixed = self._communicators(s) * self.machine.figures["communicator_bytes"] + self.machine.reserved
        head, found = self.head(self.cut(s)), []
        for rank in self._held(s):
            layers, ends = sum(s.stages[c] for c in rank.stages), self._ends(rank)
            held = self._buffers(s, self._weights(s, layers, ends)) + (head.kept if rank.lasts else 0.0)
            held += self._whole(s, layers, ends) if s.zero > 1 else 0.0
            found.append((limit - fixed) / (1 + self.machine.figures["allocator_slack"]) - held)
        return tuple(found)

    def _adaptive(self, s: Strategy, limit: float) -> Estimate:
        """The first tier that fits, for all layers."""
        found = [self.estimate(replace(s, recompute=tier), limit) for tier in TIERS]
        return next((e for e in found if e.memory <= limit / 1.1), found[-1])

    def _held(self, s: Strategy) -> tuple[Held, ...]:
        return held_by_rank(s.schedule, s.pipeline, s.chunks)

    def _pipeline_seconds(self, s: Strategy, micro_batches: int, slowest: float, times: Times, size: int) -> float:
        """Fill and drain, and the steady state: the slowest rank, or a cycle of 1F1B. Over n consecutive stages
        n micro-batches are under way, so n steps take at least the stages' times and their links there and back.
        `times` are those of a mean rank."""
        if s.pipeline == 1:
            return micro_batches * slowest
        stride = s.data * s.context * s.tensor
        slow = min(-(-s.pipeline * stride // self.machine.devices_per_node) - 1, s.pipeline - 1)
        near, far = (transfer_seconds(self.machine, crosses, size) for crosses in (False, True))
        links = 2 * (slow * far + (s.pipeline - 1 - slow) * near)
        mean = times.forward + times.backward
        whole = s.pipeline * mean
        if s.schedule not in ("one_f_one_b", "gpipe"):
            bubble = SCHEDULES[s.schedule].bubble(s.pipeline, times, s.chunks)
            return micro_batches * slowest + bubble + s.chunks * links
        cycle = max(mean + links / s.pipeline, mean + (far if slow else near)) if micro_batches >= s.pipeline else 0.0
        return whole + links + (micro_batches - 1) * max(slowest, cycle)

    def _peak(self, s: Strategy, stage: int, micro_batches: int, layer: LayerCost, head: LayerCost) -> int:
        """Bytes of tensors on the fullest rank: of all ranks when the stages are known, else of the first two and the
        last with stages of equal size."""
        last, row = s.pipeline - 1, SCHEDULES[s.schedule]
        ranks = range(s.pipeline) if s.stages else sorted({0, min(1, last), last})
        peak = 0.0
        for rank in ranks:
            chunks = self._held(s)[rank]
            layers = sum(s.stages[c] for c in chunks.stages) if s.stages else stage * row.copies
            held = self._buffers(s, self._weights(s, layers, self._ends(chunks)))
            held += self._whole(s, layers, self._ends(chunks)) if s.zero > 1 else 0.0
            live = row.frames(s.pipeline, micro_batches, rank, s.chunks) / row.copies
            kept = float(live * layers * layer.stored(s.recompute))
            kept += 1.5 * layer.kept if s.recompute == "full" else 0.0
            peak = max(peak, held + kept + (head.kept if chunks.lasts else 0.0))
        return round(peak)

    def most_layers(self, s: Strategy, limit: int) -> tuple[int, ...]:
        """Layers that each rank can hold within `limit` bytes, of all its chunks (and of both copies, where there are
        two); early stages hold more micro-batches at once."""
        layer = self.layer(self.cut(s))
        micro_batches = self.global_batch // (s.data * s.micro_batch)
        weights = self._buffers(s, self.shape.layer_parameters / s.tensor)
        fixed = self._buffers(s, self.shape.end_parameters / s.tensor) + self.machine.reserved
        fixed += self._communicators(s) * self.machine.figures["communicator_bytes"]
        fixed += self._whole(s, self.shape.layers / s.pipeline, 1) if s.zero > 1 else 0.0
        room = max((limit - fixed) / (1 + self.machine.figures["allocator_slack"]) - layer.kept, 0.0)
        found, row = [], SCHEDULES[s.schedule]
        for rank in range(s.pipeline):
            live = row.frames(s.pipeline, micro_batches, rank, s.chunks) / row.copies
            kept = layer.stored("full" if s.recompute == "adaptive" else s.recompute)
            found.append(max(int(room / (weights + live * kept)), 1))
        return tuple(found)

    def _ends(self, held: Held) -> int:
        """Matrices of embedding and head on a rank; tied ones are held once."""
        return max(held.firsts, held.lasts) if self.shape.tied else held.firsts + held.lasts

    def _weights(self, s: Strategy, layers: float, ends: int) -> float:
        """Parameters of a rank: its layers, and so many matrices of embedding and head, sharded by rows."""
        return (self.shape.layer_parameters * layers + self.shape.end_parameters * ends) / s.tensor

    def _buffers(self, s: Strategy, held: float) -> float:
        """Bytes of parameters, gradients and optimizer state for `held` parameters, each whole or the own shard."""
        optimizer = self.statistic * (3 if self.shape.dtype == "bf16" else 2)
        kinds, shards = s.sharded, self._shards(s)
        sizes = {"p": self.size, "g": self.statistic, "o": optimizer}
        return held * sum(size / (shards if kind in kinds else 1) for kind, size in sizes.items())

    def _shards(self, s: Strategy) -> int:
        """Ranks that share shards."""
        data = s.shard if 1 <= s.shard < s.data else s.data
        copies = SCHEDULES[s.schedule].copies if s.zero == 1 else 1
        return data * s.context * copies if s.zero else 1

    def _whole(self, s: Strategy, layers: float, ends: int) -> float:
        """Bytes of whole buckets that are alive at once beside the shards: gathered parameters, a layer's or an end's
        with those gathered ahead (or all of them, gathered once), and gradients on their way to the shards."""
        layer, end = self.shape.layer_parameters / s.tensor, (self.shape.end_parameters / s.tensor if ends else 0.0)
        found = 0.0
        if s.zero == 3:
            few = max((1 + s.prefetch) * layer, end + min(s.prefetch, 1) * layer)
            held = self._weights(s, layers, ends)
            found += self.size * (held if s.gather == "once" else min(few, held))
        if "g" in s.sharded:
            found += self.statistic * max(2 * layer, end + min(layers, 1) * layer if ends else 0.0)
        return found

    def _sharded_seconds(self, s: Strategy, layer: LayerCost, layers: float, ends: int) -> float:
        """Seconds of gathers and scatters of one micro-batch that its compute does not hide: what is longer than the
        layer it runs beside, and the first gather of each pass."""
        if self._shards(s) == 1 or s.zero < 2:
            return 0.0
        near = strided(s.tensor, self._shards(s), self.machine.devices_per_node)
        weights, end = self.shape.layer_parameters / s.tensor, self.shape.end_parameters / s.tensor
        found = 0.0
        if s.zero == 3 and s.gather == "each":
            one, first = (
                self._collective("all_gather", near, n * self.size) for n in (weights, end if ends else weights)
            )
            for compute in (layer.forward, layer.backward):
                found += first + layers * max(one - (compute if s.prefetch else 0.0), 0.0)
        if "g" in s.sharded:
            one, last = (
                self._collective("reduce_scatter", near, n * self.statistic)
                for n in (weights, end if ends else weights)
            )
            found += last + layers * max(one - layer.backward, 0.0)
        return found

    def _communicators(self, s: Strategy) -> int:
        groups = sum(degree > 1 for degree in (s.tensor, s.context, s.data * s.context, s.data * s.context))
        return groups + (s.tensor > 1) + 1 + (4 if s.pipeline > 1 else 0)

    def _step_end(self, s: Strategy, held: float, hidden: float) -> float:
        """Gradient sum, norm and optimizer, gather of the parameters with ZeRO. The sum runs under the last backward
        for `hidden` seconds at most, but for its last bucket."""
        replicas, shards = s.data * s.context, self._shards(s)
        far = strided(s.tensor, replicas, self.machine.devices_per_node)
        near = strided(s.tensor, min(shards, replicas), self.machine.devices_per_node)
        summed = 0.0
        if "g" not in s.sharded:
            summed = self._collective("reduce_scatter", near, held * self.statistic) if s.zero else 0.0
            summed += self._collective("all_reduce", far, held * self.statistic) if not s.zero else 0.0
        own, seconds = held / shards, max(summed - hidden, summed / max(self.shape.layers / s.pipeline + 1, 1))
        if s.zero and shards < replicas:
            between = strided(s.tensor * shards, replicas // shards, self.machine.devices_per_node)
            seconds += self._collective("all_reduce", between, own * self.statistic)
        if s.zero and (s.zero < 3 or s.gather == "once"):
            seconds += self._collective("all_gather", near, held * self.size)
        return seconds + moved_seconds(self.machine, own * (10 * self.statistic + self.size) + held * self.statistic)
