"""The printed model graph, and the networkx view of it."""

from __future__ import annotations

from collections.abc import Callable

import networkx
import pytest
from titan.compiler.graph.build import build
from titan.compiler.graph.model_graph import ModelGraph
from titan.compiler.graph.printer import print_graph
from titan.compiler.graph.view import graph_view
from titan.compiler.passes.registry import GRAPH_PASSES, run

from tests.equivalence.configurations import Configuration, spec_of, strategy_of

LONGEST = 40  # lines of a golden file

CONFIGURATIONS = {
    "llama": Configuration(),
    "gpt2": Configuration(family="gpt2", tied=True, odd=True),
    "dropout": Configuration(family="dropout"),
}


def built(configuration: Configuration, passes: int = 0) -> ModelGraph:
    """The graph after the first passes."""
    spec, strategy = spec_of(configuration), strategy_of(configuration)
    attention = spec.model.attention
    mesh = strategy.mesh(attention.kv_heads if attention else 1)
    return run(build(spec, strategy, mesh), strategy, GRAPH_PASSES[:passes])


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_built_graph(name: str, golden: Callable[[str], Callable[[str], None]]) -> None:
    text = print_graph(built(CONFIGURATIONS[name]), parts=("embed", "s") if name == "dropout" else ())
    assert len(text.splitlines()) <= LONGEST
    golden(f"graph/{name}.expect")(text)


@pytest.mark.parametrize("passes", range(len(GRAPH_PASSES) + 1))
def test_the_view_is_acyclic_and_in_the_order_of_the_list(passes: int) -> None:
    graph = built(Configuration(tensor=2, context=2, sequence_parallel=True, family="gpt2"), passes)
    view = graph_view(graph)
    assert networkx.is_directed_acyclic_graph(view)
    assert all(before < after for before, after in view.edges)
    assert len(view) == sum(len(graph.parts[index].steps) for index, _ in graph.chain)


def test_everything_leads_from_the_embedding_to_the_loss() -> None:
    graph = built(Configuration(tensor=2, sequence_parallel=True), len(GRAPH_PASSES))
    view = graph_view(graph)
    sources = [n for n in view if view.in_degree(n) == 0]
    sinks = [n for n in view if view.out_degree(n) == 0]
    assert [view.nodes[n]["part"] for n in sources] == ["embed"]
    assert [view.nodes[n]["name"] for n in sinks] == ["head.3"]
    assert networkx.descendants(view, sources[0]) | set(sources) == set(view)


def test_edges_of_the_view_are_the_values_between_steps() -> None:
    """The layer's attention, counted by hand: q, k, v from the norm; the residual reads the layer's input."""
    view = graph_view(built(Configuration()))
    steps = {(data["layer"], data["name"]): node for node, data in view.nodes(data=True) if data["name"] != "linear"}
    linears = [n for n, data in view.nodes(data=True) if data["name"] == "linear" and data["layer"] == 1]
    assert len(linears) == 7
    attention = steps[1, "attention"]
    assert sorted(data["value"] for _, _, data in view.in_edges(attention, data=True)) == ["k.rope", "q.rope", "v"]
    entering = [(view.nodes[a]["layer"], d["value"]) for a, b, d in view.edges(data=True) if b[0] == 2 and a[0] == 1]
    assert entering == [(0, "x"), (0, "x")]  # the norm and the residual
