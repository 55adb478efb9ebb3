"""Expert parallelism: the experts of a layer are shared out over ranks that hold different tokens.

The axes are those of data, context and tensor: elsewhere tokens lie by batch and sequence on them, at the experts by
expert. The exchange of tokens there and back is the all-to-all between the two layouts; nothing here says so.
"""

from __future__ import annotations

from dataclasses import replace

from titan.compiler.graph.model_graph import ModelGraph, Op, Part, active_factors
from titan.compiler.strategy import Strategy

EXPERTS = frozenset({"experts"})
INSIDE = ("expert_linear", "expert_swiglu")


def expert(graph: ModelGraph, strategy: Strategy) -> ModelGraph:
    """Shards the experts' operators by expert over the factors that the strategy names."""
    for factor in expert_factors(graph, strategy):
        graph = graph.with_parts(tuple(_apply(part, factor) for part in graph.parts))
    return graph


def expert_factors(graph: ModelGraph, strategy: Strategy) -> tuple[str, ...]:
    data, context, tensor = strategy.expert_parts
    found = []
    for factor in active_factors(graph.mesh):
        axis = factor.split(".")[0]
        inner = axis == "data" and data > 1 and factor == "data.expert"
        if inner or (axis == "context" and context > 1) or (axis == "tensor" and tensor > 1):
            found.append(factor)
    return tuple(found)


def _apply(part: Part, factor: str) -> Part:
    steps = (op.shard(factor, EXPERTS) if isinstance(op, Op) and op.operator in INSIDE else op for op in part.steps)
    return replace(part, steps=tuple(steps))
