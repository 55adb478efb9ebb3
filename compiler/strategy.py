"""The strategy: every choice about how a model lies on a cluster, each with the reason that decided it.

Search decides, passes obey: a pass has no switches of its own, it reads a field here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd

from titan.compiler.plan.mesh import Mesh
from titan.compiler.schedules.order import Order
from titan.compiler.schedules.registry import SCHEDULES


@dataclass(frozen=True, slots=True)
class Strategy:
    """Degrees by axis and every other choice.

    sequence_parallel  Megatron sequence parallelism: activations between tensor regions are sharded along the sequence
    context_form       `gathered` (keys and values gathered) or `heads` (Ulysses head exchange)
    zero               ZeRO stage
    schedule           a name of `compiler/schedules`
    recompute          `none` or `full`, for every layer
    micro_batch        sequences per micro-batch and data rank
    stages             layers of each chunk of one copy of the model, in model order; the schedule places the chunks
    wished_chunks      chunks per rank before the stages are known; 0: as many as the schedule usually has
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

    @property
    def world_size(self) -> int:
        return self.region * self.pipeline * self.data * self.context * self.tensor

    @property
    def chunks(self) -> int:
        """Chunks of one copy that a pipeline rank holds."""
        if self.stages:
            return len(self.stages) // self.pipeline
        return self.wished_chunks or SCHEDULES[self.schedule].chunks

    @property
    def order(self) -> Order:
        """What every pipeline rank does."""
        if self.written_order is not None:
            return self.written_order
        return SCHEDULES[self.schedule].order(self.pipeline, self.micro_batches, self.chunks)

    def mesh(self, kv_heads: int) -> Mesh:
        """The mesh; with more tensor ranks than KV heads, `tensor` is split into `tensor.kv` and `tensor.rep`."""
        shared = gcd(self.tensor, kv_heads)
        split = (
            (("tensor", self.tensor),)
            if shared == self.tensor
            else (("tensor.kv", shared), ("tensor.rep", self.tensor // shared))
        )
        outer = (("region", self.region), ("pipeline", self.pipeline), ("data", self.data), ("context", self.context))
        return Mesh((*outer, *split))
