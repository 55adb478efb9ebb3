"""A step time that no plan within the wishes gets below, by the prices that plans are simulated with.

Every mesh pays for what all of its plans do, and the least of these bounds holds for all. A plan takes at least

    compute      of all micro-batches at the shapes that the mesh gives kernels, spread evenly over the stages; the
                 fullest stage holds a whole number of layers
    waiting      collectives of layers that are waited for where they are issued; only in overlapped pairs (DualPipe)
                 can they run under another micro-batch
    slowing      compute beside gathers and sums of sharded state, wherever these are not waited for
    filling      with 1F1B and GPipe, all stages' forwards and backwards of one micro-batch around those of the rest;
                 no other order has idle time that its steady state could not fill
    the end      the sum of the gradients that come last, the update of a rank's own state, and with ZeRO-1 and 2 the
                 gather of what it has changed

    memory       the recompute that is left when state is sharded as thriftily (`forced.py`), and the gathers for that

The closed forms of `LayerPrices` are floors: they count products, attention and kernels bound by memory as plans do,
and what is stored until backward, and leave out the smallest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from heapq import heapify, heappop, heappush
from itertools import product
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from titan.compiler.cost.bound import ideal
from titan.compiler.cost.cut import Cut
from titan.compiler.cost.estimate import Estimator
from titan.compiler.cost.layer import LayerCost
from titan.compiler.cost.network import strided, transfer_seconds
from titan.compiler.plan.frozen import dataclass
from titan.compiler.schedules.registry import schedule_row
from titan.compiler.search.forced import forced, tiers_of
from titan.compiler.search.space import Space, allowed, options, schedules
from titan.compiler.strategy import Strategy

if TYPE_CHECKING:
    from titan.compiler.spec.schema import Spec

MOST = 3_000  # micro-batches and ways to share experts whose bounds are worked out
OPEN, BATCH, FAMILY = -1, -2, -3  # how far a part of the space has been looked into; from 0: a way to share experts
MARGIN = 2e-4  # of the bound: plans are priced in whole nanoseconds, and a kernel takes a few thousand at least


class Piece(NamedTuple):
    """Seconds of a layer or the head: forward and backward, and what each of them waits for."""

    forward: float
    backward: float
    ahead: float
    behind: float
    weight: float  # of the backward

    @property
    def work(self) -> float:
        return self.forward + self.backward

    @property
    def waits(self) -> float:
        return self.ahead + self.behind

    @property
    def whole(self) -> float:
        return self.work + self.waits

    @property
    def share(self) -> float:
        """Of the forward."""
        return (self.forward + self.ahead) / self.whole


class State(NamedTuple):
    """One way to keep state: bytes that a mean stage holds; seconds in which its gathers and sums occupy a link while
    the body of a step runs, of the sum that the body leaves to wait for, and of the gather and the update after it."""

    held: float
    moving: float
    last: float
    gather: float
    update: float


class Orders(NamedTuple):
    """Which kinds of orders there are: of schedules that fill ranks with whole micro-batches, that pair forwards and
    backwards, and of others."""

    filled: bool
    paired: bool
    others: bool


class Body(NamedTuple):
    """The forwards and backwards of a step: seconds that no order of one kind gets below; of those the mean stage's
    work and waiting. Paired orders hide state and layers alike."""

    seconds: float
    work: float
    waits: float
    paired: bool = False

    @property
    def least(self) -> float:
        return max(self.seconds, self.work + self.waits)


@dataclass(slots=True)
class Bounds:
    """Bounds of a spec's families; what one costs is remembered by what decides it."""

    spec: Spec
    estimator: Estimator
    limit: int
    pieces: dict[Cut, tuple[Piece, Piece, float]] = field(default_factory=dict)
    states: dict[tuple[int, ...], tuple[State, ...]] = field(default_factory=dict)
    orders: dict[tuple[int, int], Orders] = field(default_factory=dict)

    def least(self, space: Space) -> float:
        """Seconds that nothing in the space gets below: families, then their micro-batches, then ways to share experts,
        each with the least bound first, until none of what is left is less than the best of the last."""
        e, best = self.estimator, inf
        large = Bounds(self.spec, Estimator(ideal(e.machine), e.shape, e.global_batch), self.limit)
        paired = any(schedule_row(name).pairs for name in allowed(self.spec, "schedule"))
        cuts = [self._cut(family.plain) for family in space.families]
        floors = (large._floor(family.plain, cut, paired) for family, cut in zip(space.families, cuts, strict=True))
        queue = [(floor, order, -1, FAMILY) for order, floor in enumerate(floors)]
        heapify(queue)
        mixed = bool(e.shape.mixtures)
        looked, most = 0, MOST // (4 if mixed else 1)  # which have costs of their own
        while queue and queue[0][0] < best and looked < most:
            least, order, number, way = heappop(queue)
            family = space.families[order]
            if way >= 0:
                best = min(best, self.member(family.member(number, family.experts[way])))
            elif way == FAMILY:
                one = large._passed(family.plain, cuts[order])
                for number, batch in enumerate(family.batches):
                    heappush(queue, (max(least, one * batch.size * e.shape.layers), order, number, BATCH))
            elif way == BATCH:
                looked += 1
                cut = cuts[order]._replace(micro_batch=family.batches[number].size)
                soonest = self._soonest(family.plain, cut)
                heappush(queue, (soonest, order, number, OPEN if mixed else 0))
            else:
                looked += len(family.experts)
                for way, experts in enumerate(family.experts):
                    s = family.member(number, experts)
                    heappush(queue, (self._soonest(s, self._whole(s)), order, number, way))
        return min([best, *(row[0] for row in queue[:1])]) * (1 - MARGIN)

    def _all(self, cut: Cut) -> Piece:
        """A layer with all sequences at once: on an ideal machine no smaller micro-batch takes less for each."""
        return self._pieces(cut._replace(micro_batch=self.estimator.global_batch))[0]

    def _floor(self, s: Strategy, cut: Cut, paired: bool) -> float:
        """Seconds of all layers of a mean stage; `paired`: where paired orders are allowed."""
        layer = self._all(cut)
        time = layer.work if paired and s.pipeline > 1 else layer.whole
        return time * self.estimator.shape.layers / s.data / s.pipeline

    def _passed(self, s: Strategy, cut: Cut) -> float:
        """Seconds in which a sequence comes through a layer of a pipeline and back, whose micro-batches come through
        all of them one after another."""
        layer = self._all(cut)
        return (layer.work - layer.weight) / self.estimator.global_batch if s.pipeline > 1 else 0.0

    def member(self, s: Strategy) -> float:
        """Seconds that no schedule, recompute or sharding gets below on a mesh with a micro-batch and a way to share
        experts. Infinite where nothing fits into memory."""
        cut, micro_batches = self._whole(s), self.estimator.global_batch // (s.data * s.micro_batch)
        layer, _, _ = self._pieces(cut)
        tiers = tiers_of(self.estimator.layer(cut), allowed(self.spec, "recompute"))
        link = self.estimator.machine.host.bandwidth if self._on_host("activations") else 0.0
        n, pass_ = self.estimator.shape.layers, layer.work - layer.weight
        found = inf
        for state, body in product(self._states(s, micro_batches), self._bodies(s, cut)):
            room, seconds = self._room - state.held, self._step(s, body, state)
            if seconds < found:
                again = forced(tiers, room, link, n, s.pipeline, micro_batches, seconds, pass_)
                found = min(found, self._step(s, body, state, again))
        return found

    def _soonest(self, s: Strategy, cut: Cut) -> float:
        return min(body.least for body in self._bodies(s, cut))

    @property
    def _room(self) -> float:
        """Bytes for tensors of a rank."""
        machine = self.estimator.machine
        return (self.limit - machine.reserved) / (1 + machine.figures["allocator_slack"])

    def _on_host(self, word: str) -> bool:
        """Whether the host may hold it."""
        return bool({word, "both"} & {*allowed(self.spec, "offload")})

    def _whole(self, s: Strategy) -> Cut:
        return self.estimator.kept_logits(s)

    def _cut(self, s: Strategy) -> Cut:
        """Without a way to share experts, and with logits that are kept: that takes less time."""
        return self.estimator.kept_logits(s, open_experts=bool(self.estimator.shape.mixtures))

    def _bodies(self, s: Strategy, cut: Cut) -> list[Body]:
        """The body of a step by each kind of order that there is. `s` gives the mesh, `cut` the micro-batch."""
        layer, head, link = self._pieces(cut)
        n, micro_batches = self.estimator.shape.layers, self.estimator.global_batch // (s.data * cut.micro_batch)
        share = micro_batches / s.pipeline
        work, waits = share * (n * layer.work + head.work), share * (n * layer.waits + head.waits)
        orders = self._orders(s.pipeline, micro_batches)
        if s.pipeline == 1:
            return [Body(0.0, work, waits)]
        links = 2 * (s.pipeline - 1) * link
        # no micro-batch of the next step starts before the updates of its first stage, which follow all backwards there
        latency = n * (layer.whole - layer.weight) + head.whole - head.weight + (0.0 if orders.paired else links)
        found = []
        if orders.others:
            fullest = micro_batches * self._fullest(s.pipeline, layer.whole, head.whole)
            found.append(Body(max(latency, fullest), work, waits))
        elif orders.filled:
            found.append(Body(self._filled(s.pipeline, micro_batches, layer, head) + links, work, waits))
        if orders.paired:
            # a stage is beside another one's communication at best; of three axes that layers wait for, one takes a
            # third of that at least
            latency -= n * layer.waits + head.waits
            found.append(Body(latency, work + self._slowed * waits / 3, 0.0, True))
        return found

    def _step(self, s: Strategy, body: Body, state: State, again: float = 0.0) -> float:
        """The body of a step with its end, and with `again` seconds of recompute. Updates that do not wait for the norm
        may run before other stages' ends."""
        slowed = body.work + again + body.waits + self._slowed * max(state.moving - body.waits, 0.0)
        if s.pipeline > 1 and self.spec.parallel.late_check.allows(True):
            return max(body.seconds, slowed + state.update, state.moving)
        return max(body.seconds, slowed, state.moving) + state.last + max(state.gather, state.update)

    @property
    def _slowed(self) -> float:
        """Share of the time of a transfer beside which compute runs that the compute loses."""
        machine = self.estimator.machine
        return 0.0 if machine.cores else 1 - 1 / machine.figures["overlap_slowdown"]

    def _orders(self, pipeline: int, micro_batches: int) -> Orders:
        key = (pipeline, micro_batches)
        if key not in self.orders:
            rows = [schedule_row(name) for name, _ in schedules(self.spec, *key)]
            others = not all(row.fills or row.pairs for row in rows)
            self.orders[key] = Orders(any(row.fills for row in rows), any(row.pairs for row in rows), others)
        return self.orders[key]

    def _pieces(self, cut: Cut) -> tuple[Piece, Piece, float]:
        """A layer and the head, the better of what may be done with tensors outside of tensor-parallel regions; seconds
        of a transfer between stages."""
        if cut not in self.pieces:
            e, plain = self.estimator, cut.sequence_parallel and self.spec.parallel.sequence_parallel.allows(False)
            cuts = [cut, cut._replace(sequence_parallel=False)] if plain and self._summed(cut) else [cut]
            layers, heads = ([_piece(price(c)) for c in cuts] for price in (e.layer, e.head))
            link = transfer_seconds(e.machine, False, min(e.layer(c).entry for c in cuts))
            self.pieces[cut] = Piece(*map(min, *layers, layers[0])), Piece(*map(min, *heads, heads[0])), link
        return self.pieces[cut]

    def _summed(self, cut: Cut) -> bool:
        """Whether a sum over the ranks of a tensor-parallel region takes less than a scatter and a gather: of short
        messages, as a tree."""
        near = strided(1, cut.tensor, self.estimator.machine.devices_per_node)
        whole = float(cut.micro_batch * cut.sequence // cut.context * self.estimator.shape.hidden * self.estimator.size)
        seconds = [self.estimator.collective(o, near, whole) for o in ("all_gather", "reduce_scatter", "all_reduce")]
        return seconds[2] < seconds[0] + seconds[1]

    def _fullest(self, pipeline: int, layer: float, head: float) -> float:
        """Seconds per micro-batch of the stage that has most of equal layers; the rank of the head may have fewer."""
        n = self.estimator.shape.layers
        if pipeline == 1 or self.estimator.shape.mixtures:
            return (n * layer + head) / pipeline
        least = (n * layer + head) / pipeline
        beside = max(int((least - head) / layer), 0)  # layers beside the head
        tried = (max(-(-(n - k) // (pipeline - 1)) * layer, k * layer + head) for k in (beside, beside + 1))
        return max(least, min(tried))

    def _filled(self, pipeline: int, micro_batches: int, layer: Piece, head: Piece) -> float:
        """1F1B: rank r waits with up to p - r micro-batches for its first backward, which has the whole model before
        it and what its others take behind it. So x of its seconds per micro-batch, f of them forward, add at least
        (m - 1) x - (min(m, p - r) - 1) f to the time of one micro-batch, with GPipe (m - 1) x; the split of the layers
        that makes all ranks add the same is the best one."""
        one = self.estimator.shape.layers * layer.whole + head.whole
        if micro_batches == 1:
            return one
        share = max(layer.share, head.share)
        waiting = (min(micro_batches, pipeline - rank) - 1 for rank in range(pipeline))
        return one * (1 + 1 / sum(1 / (micro_batches - 1 - w * share) for w in waiting))

    def _states(self, s: Strategy, micro_batches: int) -> tuple[State, ...]:
        key = (s.pipeline, s.data, s.context, s.tensor, micro_batches, s.expert, s.expert_tensor)
        if key not in self.states:
            self.states[key] = tuple(self._state(s, o, micro_batches) for o in options(self.spec, s))
        return self.states[key]

    def _state(self, s: Strategy, option: Mapping[str, Any], micro_batches: int) -> State:
        """A way to shard the state of a mean stage's layers, and of the ends where there is one stage."""
        e, s = self.estimator, replace(s, **option, offload="optimizer" if self._on_host("optimizer") else "none")
        shape, node, layers = e.shape, e.machine.devices_per_node, e.shape.layers / s.pipeline
        ends = (1 if shape.tied else 2) if s.pipeline == 1 else 0
        held = shape.layer_held(s.tensor) * layers + shape.end_parameters * ends / s.tensor
        kept = e.state_bytes(s, held, layers)
        # gradient, moments and parameter read, all but the gradient written, the norm's and the zeros' pass
        each = 7 * e.statistic + e.size + (2 * e.statistic if shape.dtype == "bf16" else e.size)
        update = each * self.spec.model.parameter_count() / s.world_size / e.machine.memory_bandwidth
        replicas, shards = s.data * s.context, (s.shard or s.data) * s.context
        if replicas == 1:
            return State(kept, 0.0, 0.0, 0.0, update)
        one = shape.end_parameters / s.tensor * e.statistic if s.pipeline == 1 else 0.0
        near = strided(s.tensor, shards if s.zero else replicas, node)
        opcode = "reduce_scatter" if s.zero else "all_reduce"
        last, total = (e.collective(opcode, near, size) for size in (one, held * e.statistic))
        total += layers * e.experts_collective(s, opcode, e.statistic)
        total *= micro_batches if s.reduce == "each" and "g" in s.sharded else 1
        if not s.zero:
            return State(kept, total - last, last, 0.0, update)
        gather = e.collective("all_gather", near, held * e.size) + layers * e.experts_collective(
            s, "all_gather", e.size
        )
        if s.zero < 3:
            return State(kept, total - last, last, gather, update)
        gathers = 2 * micro_batches - 1 if s.gather == "each" else 1
        return State(kept, max(total - last, gathers * gather), last, 0.0, update)


def least_step(spec: Spec, estimator: Estimator, space: Space, limit: int) -> float:
    """Seconds of a step that no plan in the space gets below that fits into `limit` bytes; 0 where operators are priced
    by measured curves."""
    return 0.0 if estimator.machine.curves else Bounds(spec, estimator, limit).least(space)


def _piece(cost: LayerCost) -> Piece:
    (ahead, behind), ring = cost.traffic, cost.ring
    return Piece(cost.forward - ahead - ring[0], cost.backward - behind - ring[1], ahead, behind, cost.weight)
