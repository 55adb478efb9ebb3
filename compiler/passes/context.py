"""Context parallelism: the sequence is sharded over `context`; attention sees all of it in one of three forms.

`gathered`: queries stay sharded, keys and values are gathered. `heads`: attention is sharded by heads instead
(Ulysses); the head exchange is the all-to-all between the two layouts. `ring`: keys and values visit all ranks (pass
`ring`); the axis may be split, outer ranks forming rings and inner ones exchanging heads. All are nothing but the dims
named here.
"""

from __future__ import annotations

from dataclasses import replace

from titan.compiler.graph.model_graph import ModelGraph, Op, Part, active_factors
from titan.compiler.strategy import Strategy

SEQUENCE = frozenset({"sequence"})
HEADS = frozenset({"heads", "kv_heads"})
ATTENTION = ("attention", "wide_gradient", "pack_keys", "latent_attention")  # beginnings of the operators' names


def context(graph: ModelGraph, strategy: Strategy) -> ModelGraph:
    """Shards the sequence over the context axis; attention by the context form."""
    for factor in active_factors(graph.mesh):
        if factor.split(".")[0] == "context":
            heads = factor == "context.heads" or strategy.context_form == "heads"
            attention = HEADS if heads else SEQUENCE
            graph = graph.with_parts(tuple(_apply(part, factor, attention) for part in graph.parts))
    return graph


def _apply(part: Part, factor: str, attention: frozenset[str]) -> Part:
    steps = (
        op.shard(factor, attention if op.operator.startswith(ATTENTION) else SEQUENCE) if isinstance(op, Op) else op
        for op in part.steps
    )
    return replace(part, steps=tuple(steps))
