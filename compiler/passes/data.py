"""Data parallelism: every operator's batch is sharded over `data`."""

from __future__ import annotations

from dataclasses import replace

from titan.compiler.graph.model_graph import ModelGraph, Op, Part, active_factors
from titan.compiler.strategy import Strategy

BATCH = frozenset({"batch"})


def data(graph: ModelGraph, strategy: Strategy) -> ModelGraph:
    """Shards the batch of every operator over the data axis (all its factors)."""
    for factor in (f for f in active_factors(graph.mesh) if f.split(".")[0] == "data"):
        graph = graph.with_parts(tuple(_apply(part, factor) for part in graph.parts))
    return graph


def _apply(part: Part, factor: str) -> Part:
    return replace(part, steps=tuple(op.shard(factor, BATCH) if isinstance(op, Op) else op for op in part.steps))
