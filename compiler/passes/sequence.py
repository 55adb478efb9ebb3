"""Megatron sequence parallelism: norms, adds and dropout are sharded along the sequence.

The all-reduces around the tensor-parallel regions then become reduce-scatter and all-gather; nothing here says so: it
follows from the layouts.
"""

from __future__ import annotations

from dataclasses import replace

from titan.compiler.graph.model_graph import ModelGraph, Op, Part, op_labels
from titan.compiler.passes.tensor import tensor_factors
from titan.compiler.strategy import Strategy

SEQUENCE = frozenset({"sequence"})
WHOLE = (
    "token_loss",  # reads whole rows: its statistics come out of the vocabulary sums complete on every tensor rank
    "pack_keys",  # keys and values are gathered once, before they go around the ring
    "wide_gradient",
)


def sequence(graph: ModelGraph, strategy: Strategy) -> ModelGraph:
    """Shards the sequence over the tensor axis in operators that tensor parallelism leaves whole."""
    factors = tensor_factors(graph)
    if not strategy.sequence_parallel or not factors:
        return graph
    return graph.with_parts(tuple(_apply(part, factors) for part in graph.parts))


def _apply(part: Part, factors: tuple[str, ...]) -> Part:
    dims = {value.name: value.dims for value in part.values}
    return replace(part, steps=tuple(_shard(op, factors, dims) if isinstance(op, Op) else op for op in part.steps))


def _shard(op: Op, factors: tuple[str, ...], dims: dict[str, tuple[str, ...]]) -> Op:
    if any(op.sharding(f) for f in factors) or op.operator in WHOLE or not op_labels(op, dims, SEQUENCE):
        return op
    for factor in factors:
        op = op.shard(factor, SEQUENCE)
    return op
