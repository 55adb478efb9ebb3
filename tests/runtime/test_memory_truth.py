"""Predicted memory against what one rank really holds: every tensor storage made while it runs a step, counted."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from titan.compiler.lower import lower
from titan.compiler.plan.operators import OPERATORS, TensorType
from titan.compiler.plan.program import Plan
from titan.compiler.plan.scratch import call_scratch, weight_scratch
from titan.compiler.plan.segment import Call, Segment
from titan.compiler.plan.sizes import memory_by_component
from titan.compiler.schedules.registry import SCHEDULES
from titan.compiler.spec.resolve import resolve
from titan.compiler.spec.schema import Spec
from titan.compiler.strategy import Strategy
from titan.grammar.parser import parse
from titan.runtime.dtypes import DTYPES
from titan.runtime.place import Place

from tests.equivalence.configurations import Configuration, pairwise
from tests.equivalence.memory import worst
from tests.runtime.alone import Storages, beside, hold

torch.set_num_threads(1)
LAYERS, BATCH = 8, 8
LENGTH, WIDTH = 16, 256

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


@pytest.mark.parametrize(("precision", "choices"), SAMPLE, ids=lambda v: v if isinstance(v, str) else str(v or "one"))
def test_the_predicted_peak_is_within_two_percent(precision: str, choices: dict[str, Any]) -> None:
    spec = spec_of(precision)
    plan = plan_of(spec, **choices)
    for rank in sorted({0, plan.mesh.world_size - 1}):
        parts = memory_by_component(plan, plan.role_of(rank))
        held = hold(plan, spec.model.vocab, rank)
        for kind in ("parameters", "gradients", "optimizer"):
            assert held.buffers[kind[0]] == parts[kind]
        assert sum(parts.values()) == pytest.approx(held.peak, rel=0.02), parts


@pytest.mark.parametrize("schedule", ["zero_bubble_h1", "zero_bubble_v"])
def test_a_weight_frame_is_what_the_frame_held(schedule: str) -> None:
    """A split backward hands values on to the weights' backward: they are counted once."""
    spec = spec_of("fp32")
    plan = plan_of(spec, pipeline=2, data=2, zero=1, schedule=schedule)
    for rank in (0, 3):
        total = sum(memory_by_component(plan, plan.role_of(rank)).values())
        assert total == pytest.approx(hold(plan, spec.model.vocab, rank).peak, rel=0.005)


LAYOUTS = pairwise(150)[::9]


@pytest.mark.parametrize("configuration", LAYOUTS, ids=str)
def test_every_layout_holds_what_is_predicted(configuration: Configuration) -> None:
    """States to the byte; what rests between instructions and the peak within 2 %."""
    assert worst(configuration) <= 2.0


@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16"])
@pytest.mark.parametrize(
    ("operator", "attributes"),
    [
        ("embedding", {"start": 0}),
        ("embedding", {"start": "@tensor*16"}),
        ("add_positions", {"start": 0}),
        ("add_positions", {"start": "@context*16", "zigzag": 2, "chunk": 8}),
        ("add_positions_documents", {"start": 0}),
    ],
)
def test_what_the_embedding_forms_beside_its_results(operator: str, attributes: dict[str, Any], dtype: str) -> None:
    """Tokens of this rank and of others, places beyond the table: within what a few numbers of each token take."""
    kind = DTYPES[dtype]
    wide = torch.float64 if dtype == "f64" else torch.float32
    rows = 40 if attributes["start"] else 16  # of the whole table
    tokens, table = torch.arange(2 * LENGTH).view(2, LENGTH) % rows, torch.randn(16, WIDTH).to(kind)
    starts = (torch.arange(LENGTH) // 4 * 4).repeat(2, 1)
    x = torch.randn(2, LENGTH, WIDTH).to(kind)
    operands = {"embedding": [tokens, table], "add_positions": [x, table]}.get(operator, [x, table, starts])
    row = OPERATORS[operator]
    names = dict(zip(row.operands, operands, strict=True))
    values = tuple(
        (n, TensorType("i64" if t.dtype == torch.int64 else dtype, tuple(t.shape))) for n, t in names.items()
    )
    values = (*values, ("y", TensorType(dtype, tuple(x.shape))))
    call = Call(operator, ("y",), row.operands, tuple(attributes.items()))
    segment = Segment("s", row.operands[::2], ("table",), ("y",), (call,), values)
    of_weights = weight_scratch(segment, call) if operator == "embedding" else call_scratch(segment, call, True)
    on_rank = {key: 0 if key == "start" else value for key, value in attributes.items()}
    place, module = Place(seed=0, step=0, samples=(0, 1)), import_module(f"titan.runtime.operators.{operator}")

    def forward(*given: torch.Tensor) -> Any:
        return module.forward(on_rank, place, *given)

    def backward(gradient: torch.Tensor, into: torch.Tensor, *given: torch.Tensor) -> Any:
        module.backward_weight(on_rank, place, dict(zip(row.operands, given, strict=True)), (gradient,), (into,))
        return ()

    few = 64 * tokens.numel()
    if operator != "embedding":
        assert 0 <= call_scratch(segment, call, False) + few - beside(forward, *operands) <= few
    found = beside(backward, x, torch.zeros(16, WIDTH, dtype=wide), *operands)
    assert 0 <= of_weights + few - found <= few + 3 * tokens.numel()


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
