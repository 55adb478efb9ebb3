"""Degrees of the mesh that a model allows."""

from __future__ import annotations

from functools import lru_cache

from titan.compiler.spec.divisors import divisors
from titan.compiler.spec.schema import Dense, Model, Moe, Spec

AXES = ("pipeline", "data", "context", "tensor")


def tensor_degrees(spec: Spec) -> tuple[int, ...]:
    """Tensor degrees that the model and the size of the cluster allow."""
    return _tensor_degrees(spec.model, spec.cluster.world_size)


@lru_cache(maxsize=256)
def _tensor_degrees(model: Model, world: int) -> tuple[int, ...]:
    return tuple(t for t in divisors(world) if _splits(model, t))


def _splits(model: Model, tensor: int) -> bool:
    attention = model.attention
    if attention is not None:
        kv = attention.kv_heads
        if attention.heads % tensor or (tensor % kv and kv % tensor):
            return False
    return all(shared_width(group.block) % tensor == 0 for group in model.layers)


def shared_width(block: Dense | Moe) -> int:
    """Inner width that tensor ranks always share: of the feed-forward layer, or of the shared experts."""
    return block.shared * block.ffn if block.kind == "moe" else block.ffn
