"""The strategy: every choice about how a model lies on a cluster, each with the reason that decided it.

Search decides, passes obey: a pass has no switches of its own, it reads a field here.
"""

from __future__ import annotations

from dataclasses import field
from functools import lru_cache
from math import gcd
from typing import Any

from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.mesh import Mesh
from titan.compiler.schedules.order import Order
from titan.compiler.schedules.registry import schedule_row


@dataclass(frozen=True)
class Strategy:
    """Degrees by axis and every other choice.

    sequence_parallel  Megatron sequence parallelism: activations between tensor regions are sharded along the sequence
    context_form       `gathered` (keys and values gathered), `heads` (Ulysses head exchange) or `ring`
    context_heads      with `ring`: ranks of each ring place that exchange heads; context / context_heads form the ring
    context_order      with `ring`: `zigzag`, where all ranks have equal work, or `contiguous`
    loss_rows          tokens whose logits are formed at once and not kept; 0: all, kept until backward
    zero               ZeRO stage: sharded are 1 optimizer state, 2 gradients too, 3 parameters too
    expert             ranks that share the experts of a layer: of `tensor` first (with expert_tensor = 1), then of
                       `context` where the rest is a multiple of it, then of `data`
    expert_tensor      1, or `tensor`: then tensor ranks share the width of every expert, as in dense layers
    shard              data ranks that share shards (HSDP); 0: all
    gather             with ZeRO-3, parameters are gathered for `each` forward and backward, or `once` a step
    reduce             from ZeRO-2 on, gradients are scattered after `each` micro-batch; with ZeRO-3 they may be kept
                       whole and summed `once` a step
    prefetch           how many layers ahead of their use parameters are gathered (ZeRO-3, for each forward and
                       backward), and activations and optimizer state come from the host
    schedule           a name of `compiler/schedules`
    recompute          `none`, `selective` or `full` for every layer, `mixed`: as `tiers` say, or `adaptive`: the plan
                       holds all three, and the run chooses by the memory that it finds
    tiers              tier of each layer; of an adaptive plan those to begin with. Empty: all alike
    offload            what is in host memory while nobody needs it: `none`, the `optimizer` state between its updates,
                       `activations` of layers between forward and backward, or `both`
    offloaded          layers whose activations are offloaded; empty: all, where activations are
    micro_batch        sequences per micro-batch and data rank
    stages             layers of each chunk of one copy of the model, in model order; the schedule places the chunks
    wished_chunks      chunks per rank before the stages are known; 0: as many as the schedule usually has
    late_check         whether optimizer steps are taken before the norm is known, and checked under the next step
    written_order      an order that no schedule's rule makes: found for this model, or read from a file
    reasons            (field, origin, sentence): origin is user, default or search
    """

    region: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    tensor: int = 1
    sequence_parallel: bool = False
    context_form: str = "gathered"
    zero: int = 0
    schedule: str = "one_f_one_b"
    recompute: str = "none"
    micro_batch: int = 1
    micro_batches: int = 1
    stages: tuple[int, ...] = ()
    reasons: tuple[tuple[str, str, str], ...] = field(default=())
    written_order: Order | None = None
    wished_chunks: int = 0
    context_heads: int = 1
    context_order: str = "zigzag"
    loss_rows: int = 0
    tiers: tuple[str, ...] = ()
    shard: int = 0
    gather: str = "each"
    reduce: str = "each"
    prefetch: int = 1
    expert: int = 1
    expert_tensor: int = 1
    late_check: bool = False
    offload: str = "none"
    offloaded: tuple[int, ...] = ()

    def but(self, **changes: Any) -> Strategy:
        """`dataclasses.replace` in a tenth of its time, for who prices tens of thousands of strategies.

        Raises TypeError for a name that is no field.
        """
        values = self.__dict__ | changes
        if len(values) > len(self.__dict__):
            raise TypeError(f"no choices: {', '.join(changes.keys() - self.__dict__.keys())}")
        found = object.__new__(Strategy)
        object.__setattr__(found, "__dict__", values)
        return found

    @property
    def world_size(self) -> int:
        return self.region * self.pipeline * self.data * self.context * self.tensor

    def tier(self, layer: int) -> str:
        """The recompute tier of a layer; of an adaptive plan the one to begin with."""
        if self.tiers:
            return self.tiers[layer]
        return "none" if self.recompute == "adaptive" else self.recompute

    @property
    def recomputes(self) -> bool:
        """Whether anything may be recomputed."""
        return self.recompute != "none" or any(tier != "none" for tier in self.tiers)

    @property
    def state_on_host(self) -> bool:
        """Whether optimizer state lives in host memory."""
        return self.offload in ("optimizer", "both")

    def layer_on_host(self, layer: int) -> bool:
        """Whether a layer's activations wait for their backward in host memory."""
        return self.offload in ("activations", "both") and (not self.offloaded or layer in self.offloaded)

    @property
    def layers_on_host(self) -> int:
        """Number of layers, of known stages, whose activations are offloaded."""
        return sum(self.layer_on_host(layer) for layer in range(sum(self.stages)))

    @property
    def sharded(self) -> tuple[str, ...]:
        """Kinds of buffers that are sharded: optimizer state, gradients, parameters."""
        return _sharded(self.zero, self.reduce)

    @property
    def chunks(self) -> int:
        """Chunks of one copy that a pipeline rank holds."""
        if self.stages:
            return len(self.stages) // self.pipeline
        return self.wished_chunks or schedule_row(self.schedule).chunks

    @property
    def order(self) -> Order:
        """What every pipeline rank does."""
        if self.written_order is not None:
            return self.written_order
        return _order(self.schedule, self.pipeline, self.micro_batches, self.chunks)

    @property
    def expert_parts(self) -> tuple[int, int, int]:
        return expert_parts(self.expert, self.expert_tensor, self.context, self.tensor)

    def _data_factors(self) -> tuple[tuple[str, int], ...]:
        """`data`, or its factors: copies of shards (HSDP), and the innermost ranks that share experts."""
        among = self.expert_parts[0]
        hybrid = 1 <= self.shard < self.data and self.zero
        if among == 1:
            pair = (("data.replicate", self.data // self.shard), ("data.shard", self.shard)) if hybrid else ()
            return pair or (("data", self.data),)
        width = self.shard if hybrid else self.data
        inner = (("data.shard", width // among), ("data.expert", among))
        return (("data.replicate", self.data // width), *inner) if hybrid else inner

    def mesh(self, kv_heads: int) -> Mesh:
        """The mesh; with more tensor ranks than KV heads, `tensor` is split into `tensor.kv` and `tensor.rep`."""
        shared = gcd(self.tensor, kv_heads)
        split = (
            (("tensor", self.tensor),)
            if shared == self.tensor
            else (("tensor.kv", shared), ("tensor.rep", self.tensor // shared))
        )
        data = self._data_factors()
        context: tuple[tuple[str, int], ...] = (("context", self.context),)
        if self.context_form == "ring" and self.context_heads > 1:
            context = (("context.ring", self.context // self.context_heads), ("context.heads", self.context_heads))
        return Mesh((("region", self.region), ("pipeline", self.pipeline), *data, *context, *split))


@lru_cache(maxsize=16)
def _sharded(zero: int, reduce: str) -> tuple[str, ...]:
    gradients = zero == 2 or (zero == 3 and reduce == "each")
    return tuple(k for k, yes in (("o", zero), ("g", gradients), ("p", zero == 3)) if yes)


@lru_cache(maxsize=16)
def _order(schedule: str, ranks: int, micro_batches: int, chunks: int) -> Order:
    return schedule_row(schedule).order(ranks, micro_batches, chunks)


def expert_parts(expert: int, expert_tensor: int, context: int, tensor: int) -> tuple[int, int, int]:
    """Degrees on (data, context, tensor) whose ranks share the experts of a layer."""
    if expert == 1:
        return 1, 1, 1
    inner = tensor if expert_tensor == 1 else 1
    rest = expert // inner
    among = context if rest % context == 0 else 1
    return rest // among, among, inner
