"""A small model of the same structure and layout, so that a plan's mechanism can be executed in one process.

Kept: kinds of layers, norms, positions, tied weights, odd vocabulary, all layout choices, and every degree as long as
the world stays within `WORLD` ranks. Beyond that, axes shrink in this order: data, pipeline, context, tensor.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING, Any

from titan.compiler.schedules.registry import schedule_row
from titan.compiler.spec.padding import padded
from titan.compiler.strategy import Strategy

if TYPE_CHECKING:
    from titan.compiler.spec.schema import LayerGroup, Model, Spec

WORLD = 32
HEAD_DIM = 4


def shrink(spec: Spec, strategy: Strategy) -> tuple[Spec, Strategy]:
    """(small spec in float64, its strategy); the plan of the pair has the same instructions up to counts and sizes."""
    small = _degrees(strategy)
    kept = [min(count, 2) for count in strategy.stages]
    number = small.pipeline * strategy.chunks
    stages = tuple(kept[:1] + kept[len(kept) - number + 1 :]) if number > 1 else (max(kept),)
    filled = padded(spec.train.sequence, strategy) > spec.train.sequence
    sequence = 4 * small.context * small.tensor - filled
    model = _model(spec.model, small, sum(stages), sequence, spec.train.sequence)
    micro_batches = _micro_batches(strategy, small)
    order = strategy.written_order if micro_batches == strategy.micro_batches else None
    train = spec.train.model_copy(
        update={
            "sequence": sequence,
            "global_batch": small.data * small.micro_batch * micro_batches,
            "precision": "fp64",
            "warmup_steps": 0,
            "steps": 4,
            "total_tokens": None,
            "data": f"synthetic({model.vocab})",
            "validation": None,
        }
    )
    model = model.model_copy(update={"max_positions": sequence})
    away = tuple(layer for layer in strategy.offloaded if layer < sum(stages)) or (0,) * bool(strategy.offloaded)
    return (
        replace(spec, model=model, train=train),
        replace(small, offloaded=away, stages=stages, micro_batches=micro_batches, written_order=order),
    )


def _micro_batches(strategy: Strategy, small: Strategy) -> int:
    """All of them where the order is written out, for so many ranks; else as few as the schedule takes that show it."""
    row = schedule_row(strategy.schedule)
    if (strategy.written_order is not None or row.size) and small.pipeline == strategy.pipeline:
        return strategy.micro_batches
    few = min(strategy.micro_batches, 2 * small.pipeline)
    return next((m for m in range(few, few + 4 * small.pipeline) if row.legal(small.pipeline, m)), few)


def _degrees(strategy: Strategy) -> Strategy:
    row = schedule_row(strategy.schedule)
    small = replace(strategy, micro_batch=min(strategy.micro_batch, 2), reasons=())
    axes = (("data", 2), ("pipeline", 2), ("context", 2), ("tensor", 2), ("pipeline", 1), ("data", 1))
    for axis, floor in axes if row.size is None else [a for a in axes if a[0] != "pipeline"]:
        while small.world_size > WORLD and getattr(small, axis) > floor:
            change: dict[str, Any] = {axis: _smaller(getattr(small, axis), floor)}
            small = replace(small, **change)
    if row.copies > 1 and small.pipeline % 2:
        small = replace(small, pipeline=2)
    if small.shard and (small.data % small.shard or small.shard >= small.data):
        small = replace(small, shard=gcd(small.shard, max(small.data // 2, 1)))  # still copies of shards, where it can
    return small


def _smaller(degree: int, floor: int) -> int:
    """The next smaller divisor, but not below the floor."""
    return max(floor, next(d for d in range(degree - 1, 0, -1) if degree % d == 0))


def _model(model: Model, strategy: Strategy, layers: int, sequence: int, whole: int) -> Model:
    """`sequence` tokens instead of `whole`; windows are as large a share of it."""
    parts = strategy.tensor * strategy.context
    update: dict[str, object] = {
        "vocab": 8 * strategy.tensor + (3 if model.vocab % strategy.tensor else 0),
        "hidden": 16,
    }
    if model.attention is not None:
        ratio = model.attention.heads // model.attention.kv_heads
        kv_heads = model.attention.kv_heads if model.attention.kv_heads <= parts else parts
        heads = kv_heads * min(ratio, max(2, -(-parts // kv_heads)))
        while heads % parts:
            heads += kv_heads
        update["attention"] = model.attention.model_copy(
            update={"heads": heads, "kv_heads": kv_heads, "head_dim": HEAD_DIM}
        )
    groups: list[LayerGroup] = []
    for group in model.layers:
        count = min(group.count, layers - sum(g.count for g in groups))
        if count:
            window = group.block.window and max(sequence * group.block.window // whole, 1)
            block = group.block.model_copy(update={"ffn": 4 * strategy.tensor, "window": window})
            groups.append(group.model_copy(update={"count": count, "block": block}))
    missing = layers - sum(g.count for g in groups)
    groups[-1] = groups[-1].model_copy(update={"count": groups[-1].count + missing})
    return model.model_copy(update={**update, "layers": tuple(groups)})
