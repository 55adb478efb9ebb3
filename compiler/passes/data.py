"""Data parallelism: every operator's batch is sharded over `data`."""

from __future__ import annotations

from dataclasses import replace

from titan.compiler.graph.model_graph import ModelGraph, Op, Part, active_factors
from titan.compiler.strategy import Strategy

BATCH = frozenset({"batch"})


def data(graph: ModelGraph, strategy: Strategy) -> ModelGraph:
    """Shards the batch of every operator over the data axis."""
    if "data" not in active_factors(graph.mesh):
        return graph
    return graph.with_parts(tuple(_apply(part) for part in graph.parts))


def _apply(part: Part) -> Part:
    return replace(part, steps=tuple(op.shard("data", BATCH) if isinstance(op, Op) else op for op in part.steps))
