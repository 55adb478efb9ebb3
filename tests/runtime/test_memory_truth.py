"""Predicted memory against what one rank really holds: every tensor storage made while it runs a step, counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from titan.compiler.lower import lower
from titan.compiler.plan.program import Plan
from titan.compiler.plan.sizes import Sizes, memory_by_component
from titan.compiler.schedules.registry import SCHEDULES
from titan.compiler.spec.resolve import resolve
from titan.compiler.spec.schema import Spec
from titan.compiler.strategy import Strategy
from titan.grammar.parser import parse
from titan.runtime.data import SyntheticSource
from titan.runtime.interpreter import Executable
from titan.runtime.state import allocate

from tests.runtime.alone import EchoTransport, Storages

torch.set_num_threads(1)
LAYERS, BATCH = 8, 8

SAMPLE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fp32", {}),
    ("bf16", {}),
    ("fp32", {"data": 2, "zero": 1}),
    ("bf16", {"data": 2, "zero": 1}),
    ("bf16", {"data": 2, "zero": 2}),
    ("fp32", {"data": 4, "zero": 2, "shard": 2}),
    ("bf16", {"data": 2, "zero": 3}),
    ("bf16", {"data": 4, "zero": 3, "prefetch": 0}),
    ("fp32", {"data": 2, "zero": 3, "gather": "once"}),
    ("bf16", {"data": 4, "zero": 3, "shard": 2, "reduce": "once"}),
    ("fp32", {"tensor": 2}),
    ("bf16", {"tensor": 2, "sequence_parallel": True, "data": 2, "zero": 3}),
    ("bf16", {"context": 2, "zero": 1}),
    ("fp32", {"context": 2, "context_form": "heads", "zero": 3}),
    ("fp32", {"pipeline": 2, "data": 2, "zero": 1}),
    ("bf16", {"pipeline": 2, "data": 2, "zero": 3}),
    ("bf16", {"pipeline": 2, "schedule": "interleaved"}),
    ("fp32", {"pipeline": 2, "schedule": "gpipe", "data": 2, "zero": 2}),
    ("fp32", {"recompute": "selective"}),
    ("bf16", {"recompute": "full", "data": 2, "zero": 3}),
)


def spec_of(precision: str) -> Spec:
    return resolve(
        parse(
            f"""import clusters.local
model = model {{
    vocab = 256, hidden = 64, layers = {LAYERS} * dense {{ ffn = 192 }}, max_positions = 256, norm = rms_norm
    attention = gqa {{ heads = 4, kv_heads = 2, head_dim = 16 }}, positions = rope, rope = {{ theta = 10000 }}
    init_std = 0.05
}}
cluster = local.cpu with {{ devices_per_node = 8 }}
train {{
    sequence = 256, global_batch = {BATCH}, precision = {precision}, steps = 4, clip = 0.5
    optimizer = adamw {{ learning_rate = 0.001 }}, data = synthetic(256)
}}
""",
            "memory.titan",
        ),
        Path(),
    )


def plan_of(spec: Spec, **choices: Any) -> Plan:
    strategy = Strategy(**choices)
    chunks = strategy.pipeline * SCHEDULES[strategy.schedule].chunks
    stages = (LAYERS // chunks,) * chunks
    return lower(spec, Strategy(**choices, micro_batches=BATCH // strategy.data, stages=stages))


def measured(plan: Plan, spec: Spec, rank: int) -> tuple[int, int]:
    """Bytes of the rank's buffers, and the most bytes alive in its second step, when everything lasting is made."""
    with Storages() as storages:
        state = allocate(plan, rank)
        buffers = storages.live
        executable = Executable(plan, rank, EchoTransport(rank), state, SyntheticSource(spec.model.vocab, seed=1))
        for step in range(2):
            storages.peak = storages.live
            for handle in executable.run(step):
                raise AssertionError(f"nothing is waited for here, but {handle}")
    return buffers, storages.peak


@pytest.mark.parametrize(("precision", "choices"), SAMPLE, ids=lambda v: v if isinstance(v, str) else str(v or "one"))
def test_the_predicted_peak_is_within_two_percent(precision: str, choices: dict[str, Any]) -> None:
    spec = spec_of(precision)
    plan = plan_of(spec, **choices)
    for rank in sorted({0, plan.mesh.world_size - 1}):
        parts = memory_by_component(plan, plan.role_of(rank))
        buffers, peak = measured(plan, spec, rank)
        assert buffers == sum(parts[kind] for kind in ("parameters", "gradients", "optimizer", "buffers"))
        assert sum(parts.values()) == pytest.approx(peak, rel=0.02), parts


@pytest.mark.parametrize("schedule", ["zero_bubble_h1", "zero_bubble_v"])
def test_a_split_backward_holds_no_more_than_predicted(schedule: str) -> None:
    """What a weight frame takes over from a frame is counted in both for the length of one instruction."""
    spec = spec_of("fp32")
    plan = plan_of(spec, pipeline=2, data=2, zero=1, schedule=schedule)
    for rank in (0, 3):
        total = sum(memory_by_component(plan, plan.role_of(rank)).values())
        _, peak = measured(plan, spec, rank)
        twice = max(Sizes(plan).register(f"wf.{s.name}.l0:0") for s in plan.segments if s.weight_frame)
        assert 0.98 * peak <= total <= 1.02 * (peak + twice)


def test_a_storage_is_counted_until_it_is_gone() -> None:
    """The count itself: views count nothing, what is kept by a view counts whole."""
    with Storages() as storages:
        whole = torch.zeros(1000)
        part = whole[:10]
        assert storages.live == 4000
        del whole
        assert storages.live == 4000 and storages.peak == 4000
        other = part + 1
        assert storages.live == 4040 and len(other) == 10
        del part
        assert storages.live == 40 and storages.peak == 4040
