"""How the search lets ranks share a sequence: rings across nodes, heads exchanged inside them, by price."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from titan.compiler.cost.simulate import simulate
from titan.compiler.lower import lower
from titan.compiler.search.search import SearchResult, search
from titan.compiler.spec.schema import Spec

from tests.compiler.spec.writing import resolved


@cache
def spec(nodes: int, kv_heads: int = 8) -> Spec:
    """Attention of 32 heads over 128Ki tokens that all devices of some nodes share."""
    return resolved(f"""
import clusters.nvidia
import models.llama
model = llama.llama3_8b with {{
    max_positions = 128Ki, layers = 2 * dense {{ ffn = 14336 }}, attention.kv_heads = {kv_heads}
}}
cluster = nvidia.dgx_h100 with {{ nodes = {nodes} }}
train {{ sequence = 128Ki, global_batch = 1, precision = bf16, data = tokens("corpus.tokens") }}
parallel {{ context = {8 * nodes}, tensor = 1, pipeline = 1 }}
""")


@cache
def chosen(nodes: int, kv_heads: int = 8) -> SearchResult:
    return search(spec(nodes, kv_heads))


def reason(found: SearchResult, key: str) -> str:
    return next(text for name, _, text in found.strategy.reasons if name == key)


def test_a_ring_goes_across_nodes_and_heads_are_exchanged_inside() -> None:
    found = chosen(4)
    assert (found.strategy.context_form, found.strategy.context_heads) == ("ring", 8)
    text = reason(found, "context_heads")
    assert "a ring of 4 across nodes" in text and "8 ranks exchange heads inside a node" in text
    assert "more: " in reason(found, "context_form")  # what another form would cost
    assert "less, by estimate" not in text or "simulated" in text.partition("by estimate")[2]


def test_no_other_form_is_faster() -> None:
    """Each legal one lowered and simulated."""
    found = chosen(2)
    times = {}
    for form, heads in (("gathered", 1), *(("ring", n) for n in (1, 2, 4, 8))):
        s = replace(found.strategy, context_form=form, context_heads=heads)
        times[form, heads] = simulate(lower(spec(2), s)).seconds
    mine = times[found.strategy.context_form, found.strategy.context_heads]
    assert mine <= 1.001 * min(times.values())


def test_no_more_ranks_exchange_heads_than_there_are_kv_heads() -> None:
    found = chosen(2, kv_heads=2)
    assert found.strategy.context_form == "ring" and found.strategy.context_heads <= 2
