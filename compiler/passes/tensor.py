"""Megatron tensor parallelism: heads, ffn and vocabulary are sharded over `tensor`.

Which linear is column- and which row-parallel follows from the dims: a sharded output dim makes a column, a sharded
contraction a row. With fewer KV heads than ranks the axis is split: `tensor.kv` shards KV heads, `tensor.rep` does not.
"""

from __future__ import annotations

from dataclasses import replace

from titan.compiler.graph.model_graph import ModelGraph, Op, Part, active_factors, op_labels
from titan.compiler.strategy import Strategy

SHARDED = frozenset({"heads", "kv_heads", "ffn", "vocab"})


def tensor_factors(graph: ModelGraph) -> tuple[str, ...]:
    return tuple(f for f in active_factors(graph.mesh) if f.split(".")[0] == "tensor")


def tensor(graph: ModelGraph, strategy: Strategy) -> ModelGraph:
    """Shards heads, ffn and vocabulary over the tensor axis."""
    for factor in tensor_factors(graph):
        names = SHARDED - {"kv_heads"} if factor == "tensor.rep" else SHARDED
        graph = graph.with_parts(tuple(_apply(part, factor, names) for part in graph.parts))
    return graph


def _apply(part: Part, factor: str, names: frozenset[str]) -> Part:
    dims = {value.name: value.dims for value in part.values}
    steps = (op.shard(factor, names) if isinstance(op, Op) and op_labels(op, dims, names) else op for op in part.steps)
    return replace(part, steps=tuple(steps))
