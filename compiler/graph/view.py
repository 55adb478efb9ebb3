"""A networkx view of one part of the model graph, made when a graph algorithm is wanted; the graph itself is a list."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from titan.compiler.graph.model_graph import Convert, ModelGraph, Op
from titan.compiler.plan.segment import Segment

if TYPE_CHECKING:
    import networkx


def graph_view(graph: ModelGraph) -> networkx.DiGraph[Any]:
    """The whole model: a node per step of every part instance, an edge per value that one makes and another reads.

    A node is (position in the chain, index of the step) with `step`, `part`, `layer` and `name` (operator, opcode or
    segment); an edge carries `value`. Parameters and data have no node.
    """
    import networkx

    view: networkx.DiGraph[Any] = networkx.DiGraph()
    entering: tuple[Any, ...] = ()  # who made the outputs of the part before
    for position, (index, layer) in enumerate(graph.chain):
        part = graph.parts[index]
        activations = [name for name in part.inputs if part.table[name].kind == "activation"]
        makers: dict[str, Any] = dict(zip(activations, entering, strict=False))
        for number, step in enumerate(part.steps):
            node = (position, number)
            view.add_node(node, step=step, part=part.name, layer=layer, name=_name(step))
            for value in _reads(step):
                if value in makers:
                    view.add_edge(makers[value], node, value=value)
            makers.update(dict.fromkeys(_writes(step), node))
        entering = tuple(makers[name] for name in part.outputs)
    return view


def _name(step: Op | Convert | Segment) -> str:
    if isinstance(step, Op):
        return step.operator
    return step.name if isinstance(step, Segment) else step.forward


def _reads(step: Op | Convert | Segment) -> tuple[str, ...]:
    if isinstance(step, Op):
        return step.operands
    return step.inputs if isinstance(step, Segment) else (step.source,)


def _writes(step: Op | Convert | Segment) -> tuple[str, ...]:
    if isinstance(step, Op):
        return step.results
    return step.outputs if isinstance(step, Segment) else (step.result,)
