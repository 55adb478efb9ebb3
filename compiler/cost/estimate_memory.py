"""Closed forms of memory: what a rank of a candidate layout holds, without building a plan."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

from titan.compiler.cost.cut import Cut
from titan.compiler.cost.held import Frames, Held, frames_held, held_by_rank
from titan.compiler.cost.layer import LayerCost, LayerPrices
from titan.compiler.cost.machine import Machine
from titan.compiler.cost.offload import kept_layers, nearby
from titan.compiler.cost.shape import Shape
from titan.compiler.schedules.registry import schedule_row
from titan.compiler.spec.padding import padded
from titan.compiler.strategy import Strategy

NOTHING = LayerCost(0.0, 0.0, 0, 0)
# what decides how many bytes of state a rank has, beside its layers and ends
_STATE = attrgetter(
    "data", "context", "tensor", "expert", "expert_tensor", "schedule", "zero", "shard", "gather", "reduce", "prefetch",
    "offload", "late_check",
)  # fmt: skip


class Activations(NamedTuple):
    """Of a pipeline rank its layers, its matrices of embedding and head, and bytes of activations at their peak."""

    layers: float
    ends: int
    kept: float


class _Place(NamedTuple):
    """What is known of a pipeline rank before its layers are: its stages, whether it holds the last one, its matrices
    of embedding and head, and frames under way (`frames_held`)."""

    stages: tuple[int, ...]
    lasts: int
    ends: int
    frames: tuple[Frames, ...]


def _covers(one: _Place, other: _Place) -> bool:
    """Whether of two ranks with as many layers one holds no less of anything."""
    frames = all(any(f >= g and w >= v and bool(w) == bool(v) for f, w in one.frames) for g, v in other.frames)
    return frames and one.lasts >= other.lasts and one.ends >= other.ends


def _fullest(ranks: Iterable[Activations]) -> tuple[Activations, ...]:
    """Ranks without those that hold no more of anything than another."""
    found: list[Activations] = []
    for one in sorted(ranks, reverse=True):  # so none has more layers than those before it
        for other in found:
            if other.ends >= one.ends and other.kept >= one.kept:
                break
        else:
            found.append(one)
    return tuple(found)


class MemoryForms(LayerPrices):
    """What candidates of one model hold on one machine."""

    def __init__(self, machine: Machine, shape: Shape, global_batch: int) -> None:
        super().__init__(machine, shape)
        self.global_batch = global_batch
        self.slack = 1 + machine.figures["allocator_slack"]  # of bytes of tensors
        self._known: dict[tuple[str, int, int, int, bool], tuple[_Place, ...]] = {}
        self._states: dict[tuple[Any, ...], dict[tuple[float, int], tuple[float, float]]] = {}
        self._most: dict[tuple[str, int, int], int] = {}  # matrices of embedding and head
        self._each: dict[tuple[int, str, bool, bool, int], float] = {}  # bytes of one parameter's buffers

    def cut(self, s: Strategy) -> Cut:
        return Cut(
            padded(self.shape.sequence, s), s.tensor, s.context, s.sequence_parallel, s.context_form, s.micro_batch,
            s.context_heads, s.context_order == "zigzag", s.loss_rows, (*s.expert_parts, s.expert_tensor),
        )  # fmt: skip

    def kept_logits(self, s: Strategy, open_experts: bool = False) -> Cut:
        """The cut of the strategy that keeps its logits; where experts are open, no way of sharing them costs less."""
        return Cut(
            padded(self.shape.sequence, s), s.tensor, s.context, s.sequence_parallel, s.context_form, s.micro_batch,
            s.context_heads, s.context_order == "zigzag", 0,
            () if open_experts else (*s.expert_parts, s.expert_tensor),
        )  # fmt: skip

    def room(self, s: Strategy, limit: int) -> tuple[float, ...]:
        """Bytes that each rank has for activations, for known stages."""
        fixed = self._communicators(s) * self.machine.figures["communicator_bytes"] + self.machine.reserved
        head, found = self.head(self.cut(s)), []
        for rank in self._held(s):
            layers, ends = sum(s.stages[c] for c in rank.stages), self._ends(rank)
            held = self._buffers(s, self._weights(s, layers, ends)) + (head.kept if rank.lasts else 0.0)
            held += self._expert_buffers(s, layers)
            held += self._whole(s, layers, ends) if s.zero > 1 else 0.0
            found.append((limit - fixed) / self.slack - held)
        return tuple(found)

    def _held(self, s: Strategy) -> tuple[Held, ...]:
        return held_by_rank(s.schedule, s.pipeline, s.chunks)

    def _peak(self, s: Strategy, ranks: tuple[Activations, ...]) -> int:
        """Bytes of tensors on the fullest of the ranks."""
        known, peak = self._states.setdefault(_STATE(s), {}), 0.0
        for layers, ends, kept in ranks:
            state = known.get((layers, ends))
            if state is None:
                state = known[layers, ends] = self._held_state(s, layers, ends), self._state_nearby(s, layers, ends)
            held = state[0] + max(kept, state[1])
            peak = held if held > peak else peak
        return round(peak)

    def _held_state(self, s: Strategy, layers: float, ends: int) -> float:
        """Bytes of parameters, gradients and optimizer state of a rank, with whole buckets beside its shards."""
        held = self._weights(s, layers, ends) * self._buffers(s, 1.0) + layers * self._expert_buffers(s, 1.0)
        return held + self._whole(s, layers, ends) if s.zero > 1 else held

    def _places(self, s: Strategy, micro_batches: int) -> tuple[_Place, ...]:
        """All ranks when the stages are known; else of the first two and the last those that may hold most."""
        key = (s.schedule, s.pipeline, s.chunks, micro_batches, bool(s.stages))
        found = self._known.get(key)
        if found is None:
            held, last = self._held(s), s.pipeline - 1
            places = [
                _Place(
                    held[rank].stages, held[rank].lasts, self._ends(held[rank]),
                    frames_held(s.schedule, s.pipeline, rank, micro_batches, s.chunks),
                )
                for rank in (range(s.pipeline) if s.stages else sorted({0, min(1, last), last}))
            ]  # fmt: skip
            if not s.stages:
                places = [p for n, p in enumerate(places) if not any(_covers(q, p) for q in places[:n])]
            found = self._known[key] = tuple(places)
        return found

    def _activations(
        self, s: Strategy, stage: int, micro_batches: int, layer: LayerCost, head: LayerCost
    ) -> tuple[Activations, ...]:
        """Of the ranks of `_places`, with stages of equal size where they are unknown; without those that hold no more
        of anything than another."""
        stored, even, away = layer.stored(s.recompute), stage * schedule_row(s.schedule).copies, s.offload != "none"
        working = (1.5 if s.recompute == "full" else 0.5) * layer.kept  # a layer's gradients, and what it rebuilds
        most: dict[tuple[float, int], float] = {}
        for stages, lasts, ends, pairs in self._places(s, micro_batches):
            layers = sum(s.stages[c] for c in stages) if s.stages else even
            logits, kept = head if lasts else NOTHING, most.get((layers, ends), 0.0)
            for frames, split in pairs:
                live = (kept_layers(s, frames * layers) if away else frames * layers) * stored
                made = working
                if split:
                    live += split * (layers * layer.split + logits.split)
                    made = max(working - layer.split, 0.0)  # a part of it becomes a split frame
                live += max(made, logits.kept)
                kept = live if live > kept else kept
            most[layers, ends] = kept
        return _fullest([Activations(*parts, kept) for parts, kept in most.items()])

    def _state_nearby(self, s: Strategy, layers: float, ends: int) -> float:
        """Bytes of optimizer state of the host that are on the device at once."""
        if not s.state_on_host:
            return 0.0
        one = max(self.shape.layer_held(s.tensor), self.shape.end_parameters / s.tensor if ends else 0.0)
        held = min(nearby(s) * one, self._weights(s, layers, ends)) / self._shards(s)
        data, context, _ = s.expert_parts
        held += min(nearby(s), layers) * self._experts_held(s) / max(self._shards(s) // (data * context), 1)
        return self._state * held

    @property
    def _state(self) -> int:
        """Bytes of optimizer state per parameter."""
        return self.statistic * (3 if self.shape.dtype == "bf16" else 2)

    def most_layers(self, s: Strategy, limit: int) -> tuple[int, ...]:
        """Layers that each rank can hold within `limit` bytes, of all its chunks (and of both copies, where there are
        two); early stages hold more micro-batches at once."""
        layer = self.layer(self.cut(s))
        micro_batches = self.global_batch // (s.data * s.micro_batch)
        weights = self._buffers(s, self.shape.layer_held(s.tensor)) + self._expert_buffers(s, 1)
        fixed = self._buffers(s, self.shape.end_parameters / s.tensor) + self.machine.reserved
        fixed += self._communicators(s) * self.machine.figures["communicator_bytes"]
        fixed += self._whole(s, self.shape.layers / s.pipeline, 1) if s.zero > 1 else 0.0
        room = max((limit - fixed) / self.slack - layer.kept, 0.0)
        found = []
        for rank in range(s.pipeline):
            kept = layer.stored("full" if s.recompute == "adaptive" else s.recompute)
            pairs = frames_held(s.schedule, s.pipeline, rank, micro_batches, s.chunks)
            stays = kept_layers(s, nearby(s) + 1) > nearby(s)  # per layer, or those nearby once
            away = max((f * kept if stays else 0.0) + w * layer.split for f, w in pairs)
            found.append(max(int((room - (0.0 if stays else nearby(s) * kept)) / (weights + away)), 1))
        return tuple(found)

    def _ends(self, held: Held) -> int:
        """Matrices of embedding and head on a rank; tied ones are held once."""
        return max(held.firsts, held.lasts) if self.shape.tied else held.firsts + held.lasts

    def _most_ends(self, s: Strategy) -> int:
        """The same on the rank that holds most of them."""
        key = (s.schedule, s.pipeline, s.chunks)
        if key not in self._most:
            self._most[key] = max(map(self._ends, self._held(s)))
        return self._most[key]

    def _weights(self, s: Strategy, layers: float, ends: int) -> float:
        """Parameters of a rank: its layers, and so many matrices of embedding and head, sharded by rows."""
        return self.shape.layer_held(s.tensor) * layers + self.shape.end_parameters * ends / s.tensor

    def _expert_buffers(self, s: Strategy, layers: float) -> float:
        """The same of the experts of so many layers: they have fewer replicas, and so fewer shards."""
        if not self.shape.expert_parameters:
            return 0.0
        data, context, _ = s.expert_parts
        return self._buffers(s, self._experts_held(s) * layers, max(self._shards(s) // (data * context), 1))

    def state_bytes(self, s: Strategy, held: float, layers: float) -> float:
        """Bytes of parameters, gradients and optimizer state of a rank with `held` parameters and the experts of
        so many layers."""
        return self._buffers(s, held) + self._expert_buffers(s, layers)

    def _layer_held(self, s: Strategy) -> float:
        """Parameters of a layer on one rank, whole, its experts too."""
        return self.shape.layer_held(s.tensor) + self._experts_held(s)

    def _experts_held(self, s: Strategy) -> float:
        """The same of its experts alone."""
        if not self.shape.expert_parameters:
            return 0.0
        return self.shape.expert_parameters / (prod(s.expert_parts) * s.expert_tensor)

    def _buffers(self, s: Strategy, held: float, shards: int = 0) -> float:
        """Bytes of parameters, gradients and optimizer state for `held` parameters, each whole or the own shard."""
        key = (s.zero, s.reduce, s.late_check, s.state_on_host, shards or self._shards(s))
        if key not in self._each:
            optimizer = (0 if s.state_on_host else self._state) + (3 * self.statistic if s.late_check else 0)
            sizes, sharded = {"p": self.size, "g": self.statistic, "o": optimizer}, s.sharded
            self._each[key] = sum(size / (key[-1] if kind in sharded else 1) for kind, size in sizes.items())
        return held * self._each[key]

    def _shards(self, s: Strategy) -> int:
        """Ranks that share shards."""
        data = s.shard if 1 <= s.shard < s.data else s.data
        return data * s.context * schedule_row(s.schedule).copies if s.zero else 1

    def _whole(self, s: Strategy, layers: float, ends: int) -> float:
        """Bytes of whole buckets that are alive at once beside the shards: gathered parameters, a layer's or an end's
        with those gathered ahead (or all of them, gathered once), and gradients on their way to the shards."""
        layer, end = self._layer_held(s), (self.shape.end_parameters / s.tensor if ends else 0.0)
        found = 0.0
        if s.zero == 3:
            few = max((1 + s.prefetch) * layer, end + s.prefetch * layer)
            held = layer * layers + self.shape.end_parameters / s.tensor * ends
            found += self.size * (held if s.gather == "once" else min(few, held))
        if "g" in s.sharded:
            found += self.statistic * max(2 * layer, end + min(layers, 1) * layer if ends else 0.0)
        return found

    def _communicators(self, s: Strategy) -> int:
        groups = 2 * (s.tensor > 1) + (s.context > 1) + 2 * (s.data * s.context > 1) + (s.context_heads > 1)
        return groups + 1 + (4 if s.pipeline > 1 else 0)
