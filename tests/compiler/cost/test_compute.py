"""Compute prices: never better than the roofline, sums of their parts, and near published training runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from titan.compiler.cost.compute import fullest, gemm_seconds, moved_seconds, segment_seconds
from titan.compiler.cost.machine import Machine, read_machine
from titan.compiler.cost.predict import predict
from titan.compiler.cost.prices import Prices
from titan.compiler.lower import lower
from titan.compiler.strategy import Strategy

from tests.compiler.cost.test_network import CLUSTER
from tests.compiler.search.specs import write

MACHINE = read_machine(CLUSTER)


@pytest.mark.parametrize("m,n,k", [(1, 1, 1), (8192, 128, 8192), (16384, 16384, 16384), (7, 50257, 768)])
def test_a_product_is_never_above_the_roofline(m: int, n: int, k: int) -> None:
    seconds = gemm_seconds(MACHINE, m, n, k)
    assert seconds >= 2.0 * m * n * k / 1e15
    assert seconds >= 2.0 * (m * k + k * n + m * n) / 3e12
    assert seconds >= MACHINE.figures["launch_seconds"]


def test_efficiency_rises_with_every_dim() -> None:
    def rate(m: int, n: int, k: int) -> float:
        return 2.0 * m * n * k / gemm_seconds(MACHINE, m, n, k)

    rates = [rate(64 * f, 4096, 4096) for f in (1, 2, 4, 16, 64)]
    assert rates == sorted(rates)
    assert rate(65536, 65536, 65536) == pytest.approx(1e15 * MACHINE.figures["matmul"], rel=0.01)


def test_an_unknown_peak_takes_the_figure_of_the_cluster() -> None:
    blind: Machine = replace(MACHINE, peaks={})
    assert blind.peak("bf16") is None
    assert gemm_seconds(blind, 4096, 4096, 4096) == pytest.approx(2.0 * 4096**3 / blind.figures["flops"], rel=0.1)


@pytest.mark.parametrize("context", [1, 2, 4, 8])
def test_causal_work_of_the_last_rank(context: int) -> None:
    """Counted pair by pair: positions of the last of `context` equal parts, each with what it sees."""
    sequence = 64
    part = sequence // context
    visible = sum(position + 0.5 for position in range(sequence - part, sequence))
    mean = sequence * sequence / 2 / context
    assert fullest(part, sequence) == pytest.approx(visible / mean)


def test_units_of_a_plan_add_up(tmp_path: Path) -> None:
    """No segment is faster than its products at the peak; every segment and every optimizer step takes time."""
    plan = lower(write(tmp_path), Strategy(data=8, micro_batches=8, stages=(12,), zero=1))
    prices = Prices(plan)
    for segment in plan.segments:
        found = segment_seconds(prices.machine, segment)
        work = sum(
            c.row.flops(dict(c.attributes), tuple(segment.types[o] for o in c.operands)).forward for c in segment.body
        )
        assert found.forward >= work / 989.4e12
    role = plan.roles[0]
    for block in role.blocks:
        for instruction in block.instructions:
            assert prices.price(role, instruction) >= 0
            if instruction.row.unit or instruction.opcode == "optimizer_step":
                assert prices.price(role, instruction) > 0


def test_state_moves_through_memory_at_least_once(tmp_path: Path) -> None:
    plan = lower(write(tmp_path), Strategy(data=8, micro_batches=8, stages=(12,), zero=1))
    prices, role = Prices(plan), plan.roles[0]
    steps = [i for b in role.blocks for i in b.instructions if i.opcode == "optimizer_step"]
    own = sum(b.bytes for b in role.buffers if b.kind == "optimizer")
    assert sum(prices.price(role, i) for i in steps) / 1e9 >= own / 3.35e12
    assert moved_seconds(MACHINE, 3e12) >= 1.0


# Published step times of bf16 pre-training on H100 nodes (DGXC benchmarking, v25.02): the last one, with interleaved
# stages, has less bubble than the 1F1B that is priced here, so its bubble is taken out on both sides.
PUBLISHED = [
    ("llama.llama3_8b", 1, 128, Strategy(data=4, context=2, zero=1, micro_batches=32, stages=(32,)), 12.78, 0.0),
    ("llama.llama3_8b", 16, 2048, Strategy(data=64, context=2, zero=1, micro_batches=32, stages=(32,)), 13.16, 0.0),
    (
        "llama.llama3_70b",
        32,
        512,
        Strategy(
            pipeline=4, data=8, context=2, tensor=4, sequence_parallel=True, zero=1, micro_batches=64, stages=(20,) * 4
        ),
        14.72,
        3 / 5 / 64,
    ),
]


@pytest.mark.parametrize("model,nodes,batch,strategy,published,bubble", PUBLISHED)
def test_near_published_runs(
    tmp_path: Path, model: str, nodes: int, batch: int, strategy: Strategy, published: float, bubble: float
) -> None:
    found = predict(lower(write(tmp_path, model=model, nodes=nodes, sequence=8192, batch=batch), strategy)).timeline
    assert found.seconds * (1 - found.bubble_fraction) == pytest.approx(published * (1 - bubble), rel=0.12)
