"""Seconds and bytes of one layer and of the head on one rank, in closed form; identical layers are priced once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from math import prod
from typing import NamedTuple

from titan.compiler.cost.compute import (
    attention_seconds,
    cast_seconds,
    fullest,
    gemm_seconds,
    moved_seconds,
    slowest_steps,
)
from titan.compiler.cost.cut import Cut
from titan.compiler.cost.machine import Machine
from titan.compiler.cost.network import Placement, collective_seconds, strided, transfer_seconds
from titan.compiler.cost.shape import Mixture, Shape, Widths
from titan.compiler.plan.mask import band_pairs
from titan.compiler.plan.operators import DTYPE_BYTES
from titan.compiler.plan.sequence import needed_steps

Both = tuple[float, float]  # forward and backward


class LayerCost(NamedTuple):
    """Seconds forward and backward, communication included; bytes kept until backward, and of the layer's input.

    For the recompute tiers `selective` and `full`: bytes stored, seconds of a rebuild. `traffic`: of the seconds
    forward and backward those of collectives that are waited for where they are issued, `ring` what a ring's blocks
    hardly hide; `weight` of the backward that to weights. `split`: bytes between the two halves of a split backward,
    operands of its weights' gradients.
    """

    forward: float
    backward: float
    kept: int
    entry: int
    selective: tuple[int, float] = (0, 0.0)
    full: tuple[int, float] = (0, 0.0)
    traffic: tuple[float, float] = (0.0, 0.0)
    ring: tuple[float, float] = (0.0, 0.0)
    weight: float = 0.0
    split: int = 0

    def stored(self, tier: str) -> int:
        return self.selective[0] if tier == "selective" else self.full[0] if tier == "full" else self.kept

    def rebuilt(self, tier: str) -> float:
        return self.selective[1] if tier == "selective" else self.full[1] if tier == "full" else 0.0

    def longer(self, times: Both) -> LayerCost:
        """With passes whose compute takes so many times as long; what is waited for stays."""
        ahead, behind = (a + b for a, b in zip(self.traffic, self.ring, strict=True))
        return self._replace(
            forward=ahead + times[0] * (self.forward - ahead),
            backward=behind + times[1] * (self.backward - behind),
            weight=times[1] * self.weight,
            selective=(self.selective[0], times[0] * self.selective[1]),
            full=(self.full[0], times[0] * self.full[1]),
        )


class _Linear(NamedTuple):
    """Linear layers of a layer: seconds forward and backward, of the backward those to weights, of the forward those of
    the products whose sums over ranks are stored; bytes of operands of the weights' gradients."""

    forward: float
    backward: float
    weight: float
    last: float
    split: int


class _Mixing(NamedTuple):
    """Seconds forward and backward of attention and of collectives, of those forward the gathers of tensor regions,
    what the context form moves and what of that is heads on their way back; of a ring's transfers that show."""

    attention: Both
    traffic: Both
    gathers: float
    moved: float
    returned: float
    ring: Both


class Longer(NamedTuple):
    """How many times as long compute takes as closed forms say, forward and backward: of a layer, and of the head."""

    layer: Both
    head: Both


class LayerPrices:
    """Prices layers and heads of one model on one machine, and remembers them."""

    def __init__(self, machine: Machine, shape: Shape) -> None:
        self.machine, self.shape = machine, shape
        self.size = DTYPE_BYTES[shape.dtype]
        self.statistic = 8 if shape.dtype == "f64" else 4  # bytes of gradients and optimizer state
        self._layers: dict[Cut, LayerCost] = {}
        self._plain: dict[tuple[object, ...], list[LayerCost]] = {}  # of each kind of layers, without experts
        self._heads: dict[tuple[int, int, int, int, int], LayerCost] = {}
        self._mixed: dict[Cut, _Mixing] = {}
        self._widths: dict[int, Widths] = {}  # by tensor ranks
        self._linear: dict[tuple[int, int, int, int], tuple[float, float, float]] = {}
        self._linears: dict[tuple[int, int, int, int], _Linear] = {}
        # a few placements and sizes are asked for again and again
        self.collective: Callable[[str, Placement, float], float] = cache(partial(collective_seconds, machine))
        self.longer: Callable[[int], Longer] | None = None  # on a measured machine, by sequences of a micro-batch

    def layer(self, cut: Cut) -> LayerCost:
        if cut.loss_rows:
            cut = cut._replace(loss_rows=0)
        found = self._layers.get(cut)
        if found is None:
            found = self._mean_layer(cut) if self.shape.mixtures else self._layer(cut, self.shape.ffn)
            found = found if self.longer is None else found.longer(self.longer(cut.micro_batch).layer)
            self._layers[cut] = found
        return found

    def waiting(self, cut: Cut, seconds: float) -> LayerCost:
        """A layer each pass of which waits so much longer for its experts, rebuilt or not."""
        layer = self.layer(cut)
        again = seconds if self.longer is None else self.longer(cut.micro_batch).layer[0] * seconds
        return layer._replace(
            forward=layer.forward + seconds, backward=layer.backward + seconds,
            full=(layer.full[0], layer.full[1] + again),
        )  # fmt: skip

    def head(self, cut: Cut) -> LayerCost:
        """Final norm, output head and loss; `kept` are logits and their gradient."""
        key = (cut.sequence, cut.tensor, cut.context, cut.micro_batch, cut.loss_rows)
        found = self._heads.get(key)
        if found is None:
            found = self._head(cut)
            found = found if self.longer is None else found.longer(self.longer(cut.micro_batch).head)
            self._heads[key] = found
        return found

    def _mean_layer(self, cut: Cut) -> LayerCost:
        """Mean of the kinds of layers. Only attention, shared widths and what surrounds them is recomputed; experts and
        their exchange are not."""
        n, shared = self.shape.layers, (*cut[:-1], ())
        plains = self._plain.get(shared)
        if plains is None:
            plains = self._plain[shared] = [self._layer(Cut(*shared), kind.ffn) for kind in self.shape.mixtures]
        forward = backward = rebuilt = again = near = back = ring = ring_back = weight = 0.0
        kept = entry = selective = full = split = 0
        for kind, plain in zip(self.shape.mixtures, plains, strict=True):
            ahead, behind, stored, moved, more = self._experts(cut, kind) if kind.experts else (0.0, 0.0, 0, 0.0, 0.0)
            share, entry = kind.count / n, plain.entry
            forward += share * (plain.forward + ahead)
            backward += share * (plain.backward + behind)
            kept += round(share * (plain.kept + stored))
            selective += round(share * (plain.selective[0] + stored))
            rebuilt += share * plain.selective[1]
            full += round(share * plain.full[0])
            again += share * (plain.full[1] + ahead)
            near += share * (plain.traffic[0] + moved)
            back += share * (plain.traffic[1] + moved)
            ring += share * plain.ring[0]
            ring_back += share * plain.ring[1]
            weight += share * (plain.weight + more)
            split += round(share * (plain.split + stored))
        return LayerCost(
            forward, backward, kept, entry, (selective, rebuilt), (full, again), (near, back), (ring, ring_back),
            weight, split,
        )  # fmt: skip

    def _experts(self, cut: Cut, kind: Mixture) -> tuple[float, float, int, float, float]:
        """Seconds forward and backward of router, experts and exchange, bytes kept until backward, of both times the
        seconds of the exchange, and of the backward that to weights."""
        shape, size, stream = self.shape, self.size, cut.stream
        rows = stream * kind.top_k
        if not cut.experts:
            return self._experts_floor(kind, stream, rows)
        *ranks, width = cut.experts
        local = kind.experts // prod(ranks)
        gathered, inner = rows * width, kind.expert_ffn // width
        forward, backward, weight = self._products(stream, [(shape.hidden, kind.experts)])
        each = -(-gathered // local)  # rows of one expert, the fullest
        products = [(shape.hidden, inner)] * 2 + [(inner, shape.hidden)]
        narrow, wide, more = self._products(each, products, local)
        traffic = self.exchange_seconds(cut, kind)
        moved = moved_seconds(self.machine, size * (2 * (rows + stream) * shape.hidden + 3 * gathered * inner))
        back = moved_seconds(self.machine, size * ((3 * rows + 2 * stream) * shape.hidden + 5 * gathered * inner))
        kept = rows * shape.hidden + gathered * (shape.hidden + 3 * inner)
        return forward + narrow + traffic + moved, backward + wide + traffic + back, kept * size, traffic, weight + more

    def exchange_seconds(self, cut: Cut, kind: Mixture) -> float:
        """Seconds in which tokens of a pass go to their experts and back."""
        data, context, tensor, width = cut.experts
        per_node, whole = self.machine.devices_per_node, float(cut.stream * kind.top_k * self.shape.hidden * self.size)
        steps = ((data, cut.tensor * cut.context), (context, cut.tensor), (tensor, 1))
        found = 2 * sum(self.collective("all_to_all", strided(d, n, per_node), whole) for n, d in steps if n > 1)
        if width > 1:
            near = strided(1, width, per_node)
            found += sum(self.collective(o, near, whole * width) for o in ("all_gather", "reduce_scatter"))
        return found

    def _experts_floor(self, kind: Mixture, stream: int, rows: int) -> tuple[float, float, int, float, float]:
        """What no sharing of experts gets below: products at the rate of large ones, nothing exchanged."""
        shape, dtype, numbers = self.shape, self.shape.product_dtype or self.shape.dtype, rows * kind.expert_ffn
        forward, backward, weight = self._products(stream, [(shape.hidden, kind.experts)])
        work = 6.0 * numbers * shape.hidden / self.machine.rate(dtype, "matmul")
        moved = moved_seconds(self.machine, self.size * (2 * (rows + stream) * shape.hidden + 3 * numbers))
        back = moved_seconds(self.machine, self.size * ((3 * rows + 2 * stream) * shape.hidden + 5 * numbers))
        kept = rows * (2 * shape.hidden + 3 * kind.expert_ffn) * self.size
        return forward + work + moved, backward + 2 * work + back, kept, 0.0, weight + work

    def _layer(self, cut: Cut, width: float) -> LayerCost:
        """A layer whose feed-forward part is `width` wide."""
        shape, size, t = self.shape, self.size, cut.tensor
        tokens, stream = cut.tokens, cut.stream
        w, inner, up = self._widths.get(t), round(width / t), 2 if shape.gated else 1
        if w is None:
            w = self._widths[t] = shape.widths(t)
        linear, mixing = self._linear_layers(tokens, stream, t, w, inner), self._mixing(cut, tokens, w)
        residual, gathered, hidden = stream * shape.hidden, tokens * shape.hidden, tokens * inner
        turned = tokens * (w.queries if shape.products else w.queries + w.keys_values // 2)
        # norms and residual sums two each, rotary positions of queries and keys, activation; sums have no backward;
        # with a ring keys and values are packed, and gradients widened and narrowed
        more = 1 if cut.ring > 1 else 0
        around = moved_seconds(self.machine, size * (10 * residual + 2 * turned + (up + 1) * hidden), 7 + more)
        behind = moved_seconds(self.machine, size * (6 * residual + 2 * turned + (2 * up + 1) * hidden), 5 + more)
        near, back = mixing.traffic[0] + mixing.ring[0], mixing.traffic[1] + mixing.ring[1]
        # what was mixed is stored twice where heads are exchanged back
        spread = w.keys_values * (cut.context if cut.context_form == "gathered" else 1) + w.place * cut.context
        stored = tokens * (w.queries + spread + w.mixed * (2 if cut.exchange > 1 else 1)) + stream * w.low
        read = (gathered if w.direct else residual) + gathered + tokens * w.low  # by products
        kept = 2 * residual + read + stored + (up + 1) * hidden
        thrifty = 2 * residual + stored + up * hidden
        # what a sum over ranks has made is stored, and what attention has, where that is not latent
        least = residual * (2 if t > 1 else 1) + (0 if shape.products else tokens * w.queries)
        light = moved_seconds(self.machine, size * (4 * residual + (up + 1) * hidden))
        # not again: attention that is not latent and the way back of its heads, the last product and sum, and where
        # ranks are summed the product before that
        heavy = linear.forward - linear.last + around
        heavy -= moved_seconds(self.machine, size * (6 if t > 1 else 3) * residual)
        heavy += mixing.attention[0] + mixing.moved if shape.products else mixing.moved - mixing.returned
        return LayerCost(
            linear.forward + mixing.attention[0] + around + near,
            linear.backward + mixing.attention[1] + behind + back,
            kept * size, residual * size,
            (thrifty * size, light + mixing.gathers), (least * size, heavy + mixing.gathers),
            mixing.traffic, mixing.ring, linear.weight, linear.split,
        )  # fmt: skip

    def _linear_layers(self, tokens: int, stream: int, t: int, w: Widths, inner: int) -> _Linear:
        """The products of a layer, however its ranks share attention."""
        key = (tokens, stream, t, inner)
        found = self._linears.get(key)
        if found is not None:
            return found
        shape, up, queries, keys = self.shape, 2 if self.shape.gated else 1, w.queries, w.keys_values // 2
        products = [(shape.hidden, queries), (shape.hidden, keys), (shape.hidden, keys), (queries, shape.hidden)]
        whole: list[tuple[int, int]] = []  # of latent attention, shared by no rank: before tokens are gathered
        if shape.products:
            products = [(k // (t if n == shape.hidden else 1), n // (t if n != shape.hidden else 1))
                        for k, n, heads in shape.products if heads]  # fmt: skip
            whole = [(k, n) for k, n, heads in shape.products if not heads]
        apart = [k for k, _ in products[0 if whole else 2 :]]  # inputs of products, but for one that several share
        products += [(shape.hidden, inner)] * up + [(inner, shape.hidden)]
        one, other = self._products(tokens, products), self._products(stream, whole)
        summed = [(inner, shape.hidden)] + ([(w.mixed, shape.hidden)] if t > 1 else [])
        operands = shape.hidden + inner + sum(apart) + sum(n for _, n in products)
        split = tokens * operands + (stream * (shape.hidden + sum(n for _, n in whole)) if whole else 0)
        last = self._products(tokens, summed)[0]
        seconds = one[0] + other[0], one[1] + other[1], one[2] + other[2]
        found = self._linears[key] = _Linear(*seconds, last, split * self.size)
        return found

    def _mixing(self, cut: Cut, tokens: int, w: Widths) -> _Mixing:
        """All that is the same whatever the width of the feed-forward part."""
        found = self._mixed.get(cut)
        if found is None:
            windows = self.shape.windows if w.queries else ()
            scores = [(window, share, self._scores(cut, tokens * w.queries, window)) for window, share in windows]
            found = self._mixed[cut] = _Mixing(
                (sum(share * one[0] for _, share, one in scores), sum(share * one[1] for _, share, one in scores)),
                *self._traffic(cut, tokens, w),
                self._ring_exposed(cut, tokens * w.keys_values // 2, scores) if cut.ring > 1 else (0.0, 0.0),
            )
        return found

    def _products(self, tokens: int, products: list[tuple[int, int]], batch: int = 1) -> tuple[float, float, float]:
        """Seconds forward and backward of linear layers (inner, outer width), `batch` of each, and of the backward
        that to weights."""
        forward = backward = weight = 0.0
        for k, n in products:
            if k and n:
                key = (tokens, k, n, batch)
                found = self._linear.get(key)
                if found is None:
                    found = self._linear[key] = self._product(*key, self.shape.product_dtype or self.shape.dtype)
                forward, backward, weight = forward + found[0], backward + found[1], weight + found[2]
        return forward, backward + weight, weight

    def _product(self, tokens: int, k: int, n: int, batch: int, dtype: str) -> tuple[float, float, float]:
        forward = gemm_seconds(self.machine, tokens, n, k, dtype, self.size, batch)
        backward = gemm_seconds(self.machine, tokens, k, n, dtype, self.size, batch)
        if dtype != self.shape.dtype:
            forward += cast_seconds(self.machine, batch * tokens * k)
            backward += cast_seconds(self.machine, batch * tokens * n)
        return forward, backward, gemm_seconds(self.machine, n, k, tokens, dtype, 8, batch)

    def _traffic(self, cut: Cut, tokens: int, w: Widths) -> tuple[Both, float, float, float]:
        """Seconds of collectives forward and backward; of those forward that of the gathers of tensor regions, of the
        context form, and of the latter of heads on their way back."""
        near, size, hidden = strided(1, cut.tensor, self.machine.devices_per_node), self.size, self.shape.hidden
        whole, read = float(tokens * hidden * size), tokens * ((hidden if w.direct else 0) + w.low + w.place) * size
        if cut.sequence_parallel:
            one, other = (self.collective(o, near, whole) for o in ("all_gather", "reduce_scatter"))
            in_, out = one, other
            if read != whole:
                in_, out = (self.collective(o, near, read) for o in ("all_gather", "reduce_scatter"))
            gathers, forward, backward = in_ + one, in_ + one + 2 * other, out + other + 2 * one
        else:
            one = self.collective("all_reduce", near, whole)
            out = one if read == whole else self.collective("all_reduce", near, read)
            gathers, forward, backward = 0.0, 2 * one, one + out
        returned, moved, back = self._context_traffic(cut, tokens, w) if cut.context > 1 else (0.0, 0.0, 0.0)
        return (forward + moved, backward + back), gathers, moved, returned

    def _context_traffic(self, cut: Cut, tokens: int, w: Widths) -> tuple[float, float, float]:
        """Seconds of what was mixed on its way back, and of all that the context form moves forward and backward."""
        far = strided(cut.tensor, cut.context, self.machine.devices_per_node)
        pieces = [w.keys_values] if self.shape.products else [w.keys_values // 2] * 2
        gathered = [float(tokens * cut.context * n * self.size) for n in (w.place, *pieces)]
        shared = (
            [self.collective(o, far, gathered[0]) for o in ("all_gather", "reduce_scatter")] if w.place else [0.0] * 2
        )
        if cut.exchange > 1:
            among = strided(cut.tensor, cut.exchange, self.machine.devices_per_node)
            one = [self.collective("all_to_all", among, tokens * n * self.size) for n in (w.mixed, w.queries, *pieces)]
            return one[0], sum(one) + shared[0], sum(one) + shared[1]
        if cut.context_form == "ring":
            return 0.0, 0.0, 0.0
        once = [sum(self.collective(o, far, n) for n in gathered[1:]) for o in ("all_gather", "reduce_scatter")]
        return 0.0, once[0] + shared[0], once[1] + shared[1]

    def _scores(self, cut: Cut, width: int, window: int) -> tuple[float, float]:
        """Seconds of attention of one window forward and backward, over `width` numbers of queries: the rank or the
        step of a ring with most work decides."""
        shape, sequence, length = self.shape, cut.sequence, cut.sequence // cut.ring
        work = 4.0 * width * band_pairs((0, sequence), (0, sequence), window) / sequence  # two products
        if shape.value_dim:
            work *= (1 + shape.value_dim / shape.head_dim) / 2
        if cut.context_form == "gathered" or (cut.ring > 1 and not cut.zigzag):
            work *= fullest(sequence // cut.context, sequence, window)
        elif cut.ring > 1 and window:
            work *= slowest_steps(cut.ring, length, window)
        seen = min(length, window or length)
        floor = cut.ring * self.machine.figures["launch_seconds"]  # a kernel for each block of a ring
        return (
            max(attention_seconds(self.machine, work, seen, shape.dtype), floor),
            max(attention_seconds(self.machine, 2.5 * work, seen, shape.dtype), floor),
        )

    def _ring_exposed(self, cut: Cut, elements: int, scores: list[tuple[int, float, Both]]) -> Both:
        """What of a ring's transfers its blocks do not hide: each step passes keys and values on while it computes;
        backward their gradients too, in float32. With a window there are fewer steps. `scores`: windows, shares of
        layers that have them, and seconds of attention."""
        far = strided(cut.tensor * cut.context_heads, cut.ring, self.machine.devices_per_node)
        statistic = 8 if self.shape.dtype == "f64" else 4
        found = [0.0, 0.0]
        for window, share, times in scores:
            steps = len(needed_steps(cut.ring, cut.zigzag, cut.sequence // cut.ring, window))
            for way, (compute, size) in enumerate(zip(times, (self.size, self.size + statistic), strict=True)):
                moved = 2 * transfer_seconds(self.machine, far.nodes > 1, elements * size)
                found[way] += share * (steps - 1) * self.exposed(moved, compute / steps)
        return found[0], found[1]

    def exposed(self, seconds: float, beside: float) -> float:
        """What of a communication shows beside so many seconds of compute: where ranks compute on cores, which it loads
        too, at least its load."""
        load = self.machine.figures["communication_load"] if self.machine.cores else 0.0
        return max(seconds - beside, load * seconds)

    def _head(self, cut: Cut) -> LayerCost:
        shape, size, tokens = self.shape, self.size, cut.tokens
        columns = -(-shape.vocab // cut.tensor)
        forward, wide, weight = self._product(tokens, shape.hidden, columns, 1, shape.dtype)  # never in fewer bits
        backward = wide + weight
        logits = tokens * columns * size
        near = strided(1, cut.tensor, self.machine.devices_per_node)
        traffic = self.collective("all_gather", near, float(tokens * shape.hidden * size))
        again = forward if cut.loss_rows else 0.0  # the maximum's own pass, and the logits formed again in backward
        moved = moved_seconds(self.machine, 2.0 * logits)  # the maximum and the sum read them; gradients are formed
        return LayerCost(
            forward + again + traffic + moved,
            backward + again + traffic + moved,
            2 * (min(cut.loss_rows, tokens) * columns * size if cut.loss_rows else logits),
            tokens * shape.hidden * size, traffic=(traffic, traffic), weight=weight,
            split=(0 if cut.loss_rows else logits) + tokens * shape.hidden * size,
        )  # fmt: skip
