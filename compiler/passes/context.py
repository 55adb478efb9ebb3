"""Context parallelism: the sequence is sharded over `context`; attention sees all of it in one of two forms.

`gathered`: queries stay sharded, keys and values are gathered. `heads`: attention is sharded by heads instead
(Ulysses); the head exchange is the all-to-all between the two layouts. Both are nothing but the dims named here.
"""

from __future__ import annotations

from dataclasses import replace

from titan.compiler.graph.model_graph import ModelGraph, Op, Part, active_factors
from titan.compiler.strategy import Strategy

SEQUENCE = frozenset({"sequence"})
HEADS = frozenset({"heads", "kv_heads"})


def context(graph: ModelGraph, strategy: Strategy) -> ModelGraph:
    """Shards the sequence over the context axis; attention by the context form."""
    if "context" not in active_factors(graph.mesh):
        return graph
    attention = HEADS if strategy.context_form == "heads" else SEQUENCE
    return graph.with_parts(tuple(_apply(part, attention) for part in graph.parts))


def _apply(part: Part, attention: frozenset[str]) -> Part:
    steps = (
        op.shard("context", attention if op.operator == "attention" else SEQUENCE) if isinstance(op, Op) else op
        for op in part.steps
    )
    return replace(part, steps=tuple(steps))
