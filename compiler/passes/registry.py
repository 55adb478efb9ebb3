"""The passes over the model graph, in order, with the reason for each position."""

from __future__ import annotations

from collections.abc import Callable

from titan.compiler.graph.model_graph import ModelGraph
from titan.compiler.passes.context import context
from titan.compiler.passes.data import data
from titan.compiler.passes.expert import expert
from titan.compiler.passes.layouts import layouts
from titan.compiler.passes.recompute import recompute
from titan.compiler.passes.ring import ring
from titan.compiler.passes.segments import segments
from titan.compiler.passes.sequence import sequence
from titan.compiler.passes.tensor import tensor
from titan.compiler.strategy import Strategy

Pass = Callable[[ModelGraph, Strategy], ModelGraph]
Watch = Callable[[Pass, ModelGraph, ModelGraph], None]

GRAPH_PASSES: tuple[Pass, ...] = (
    ring,  # first: puts other operators in the place of attention
    data,  # states only, order among the four free
    context,
    tensor,  # before sequence, which fills what tensor leaves whole
    expert,  # after data, context and tensor, which shard the experts' operators otherwise
    sequence,
    layouts,  # the only pass that inserts communication; needs all states
    segments,  # nothing may insert communication after this
    recompute,  # last: says what each tier stores of the segments' values
)


def run(
    graph: ModelGraph, strategy: Strategy, passes: tuple[Pass, ...] = GRAPH_PASSES, watch: Watch | None = None
) -> ModelGraph:
    """Runs passes in order; `watch` sees every step and may print, time or verify it."""
    for step in passes:
        before, graph = graph, step(graph, strategy)
        if watch is not None:
            watch(step, before, graph)
    return graph
