"""Mixture-of-experts layers: what the expert pass makes, and proofs of plans over all axes that share experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from titan.compiler.cost.simulate import simulate
from titan.compiler.graph.build import build
from titan.compiler.graph.printer import print_graph
from titan.compiler.lower import lower
from titan.compiler.passes.registry import run
from titan.compiler.spec.legality import legal
from titan.compiler.spec.schema import Attention, Dense, LayerGroup, Mla, Model, Moe, Rope, Spec, Train
from titan.compiler.strategy import Strategy, expert_parts
from titan.compiler.verify.proofs import verify

from tests.compiler.spec.writing import resolved, spec_text

GQA = Attention(heads=8, kv_heads=4, head_dim=32, qk_norm=True)
MLA = Mla(heads=8, kv_rank=64, query_rank=96, head_dim=32, rope_dim=16, value_dim=32)
LAYERS = (
    LayerGroup(count=2, block=Dense(ffn=512)),
    LayerGroup(count=4, block=Moe(experts=16, top_k=4, ffn=64, shared=1)),
)
LAYOUTS = {
    "data": Strategy(data=8, expert=8),
    "part of data": Strategy(data=16, expert=4, zero=1),
    "tensor shares experts": Strategy(data=4, tensor=2, sequence_parallel=True, expert=8, zero=1),
    "tensor shares widths": Strategy(data=4, tensor=2, sequence_parallel=True, expert=4, expert_tensor=2, zero=2),
    "no sequence parallel": Strategy(data=4, tensor=2, expert=2, expert_tensor=2),
    "context": Strategy(data=4, context=2, expert=8, zero=1),
    "all three": Strategy(data=4, context=2, tensor=2, sequence_parallel=True, expert=8, zero=3),
    "two copies": Strategy(pipeline=2, data=4, expert=4, zero=1, schedule="dualpipe", micro_batches=8),
    "hybrid shards": Strategy(pipeline=2, data=4, expert=2, shard=2, zero=1),
    "split backward": Strategy(pipeline=2, data=4, expert=4, schedule="zero_bubble_h1", recompute="full"),
    "no experts shared": Strategy(data=4, tensor=2, sequence_parallel=True),
}


def planned(layout: Strategy, attention: Attention | Mla) -> tuple[Spec, Strategy]:
    count = max(layout.micro_batches, 2)
    stages = (3, 3) if layout.pipeline == 2 else (6,)
    strategy = replace(layout, micro_batches=count, stages=stages)
    model = Model(
        vocab=512, hidden=256, attention=attention, layers=LAYERS, rope=Rope(theta=1e4), max_positions=256
    )  # fmt: skip
    train = Train(sequence=128, global_batch=strategy.data * count, precision="bf16")
    cluster = resolved(spec_text()).cluster.model_copy(update={"nodes": 1, "devices_per_node": strategy.world_size})
    return Spec(model, cluster, train), strategy


@pytest.mark.parametrize("attention", [GQA, MLA], ids=["gqa", "mla"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_plans_with_experts_are_proved(name: str, attention: Attention | Mla) -> None:
    spec, strategy = planned(LAYOUTS[name], attention)
    assert legal(spec, strategy) == ()
    plan = lower(spec, strategy)
    assert [finding for proof in verify(plan).values() for finding in proof.findings] == []
    assert simulate(plan).seconds > 0
    assert {"dispatch", "expert_linear", "combine"} < set(plan.plan_only)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_expert_lies_on_its_ranks_and_nowhere_else(name: str) -> None:
    """The pieces on one rank times the ranks that share experts or widths are the whole."""
    spec, strategy = planned(LAYOUTS[name], GQA)
    plan = lower(spec, strategy)
    for parameter in plan.parameters:
        if ".experts." in parameter.name:
            pieces = strategy.expert * strategy.expert_tensor
            assert parameter.tensor.elements * pieces == 16 * 256 * 64
            bucket = plan.bucket_table[parameter.bucket]
            replicas = plan.group_size(bucket.replicas) if bucket.replicas else 1
            tensor = strategy.tensor // strategy.expert_parts[2] // strategy.expert_tensor
            assert replicas * pieces * tensor == strategy.world_size // strategy.pipeline


def test_tokens_travel_to_the_experts_and_back(golden: Callable[[str], Callable[[str], None]]) -> None:
    spec, strategy = planned(LAYOUTS["tensor shares experts"], GQA)
    graph = run(build(spec, strategy, strategy.mesh(4)), strategy)
    lines = print_graph(graph, "expert", ("k2s",)).splitlines()
    kept = [line for line in lines if any(w in line for w in ("sent", "gate", "down", "turned", "mixture"))]
    golden("passes/expert/exchange.expect")("\n".join(kept))


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ((1, 1, 4, 8), (1, 1, 1)),
        ((8, 1, 1, 1), (8, 1, 1)),
        ((8, 1, 1, 2), (4, 1, 2)),
        ((8, 2, 1, 2), (8, 1, 1)),
        ((8, 1, 4, 1), (2, 4, 1)),
        ((8, 1, 3, 1), (8, 1, 1)),
    ],
)
def test_axes_share_experts_from_the_inside(given: tuple[int, int, int, int], parts: tuple[int, int, int]) -> None:
    assert expert_parts(*given) == parts


def test_parameters_are_those_of_the_formula() -> None:
    spec, _ = planned(LAYOUTS["data"], MLA)
    hidden, heads, inner = 256, 8, 64
    attention = hidden * 96 + 96 + 96 * heads * 48 + hidden * (64 + 16) + 64 + 64 * heads * 64 + heads * 32 * hidden
    dense = 3 * hidden * 512
    mixture = hidden * 16 + 17 * 3 * hidden * inner
    total = 2 * 512 * hidden + 6 * (attention + 2 * hidden) + 2 * dense + 4 * mixture + hidden
    assert spec.model.parameter_count() == total
