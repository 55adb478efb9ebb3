"""What the closed forms say about recompute tiers, per layer, against plans: their own bytes and their own seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from titan.compiler.cost.simulate import simulate
from titan.compiler.search.measured import measured
from titan.compiler.search.search import estimator_of, memory_limit
from titan.compiler.strategy import Strategy

from tests.compiler.search.specs import write

GQA = "gqa { heads = 32, kv_heads = 8 }"
MLA = "mla { heads = 32, query_rank = 1536, kv_rank = 512, head_dim = 128, rope_dim = 64, value_dim = 128 }"
DENSE, MOE = "dense { ffn = 14336 }", "moe { experts = 8, top_k = 2, shared = 1, ffn = 3584 }"
MODEL = """model {{
    vocab = 32000
    hidden = 4096
    max_positions = 16384
    attention = {attention}
    layers = {number} * {block}
    rope = {{ theta = 10000 }}
}}"""


LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"data": 8},
    "gathered": {"data": 2, "context": 4},
    "heads": {"data": 2, "context": 4, "context_form": "heads"},
    "ring": {"data": 2, "context": 4, "context_form": "ring"},
    "tensor": {"data": 2, "tensor": 4, "sequence_parallel": True},
    "both": {"data": 2, "tensor": 2, "context": 2, "context_form": "heads", "sequence_parallel": True},
}
CASES = [
    *((GQA, DENSE, layout, 0.05) for layout in LAYOUTS),
    *((MLA, DENSE, layout, 0.05) for layout in LAYOUTS if layout != "ring"),
    (GQA, MOE, "data", 0.02),
    (MLA, MOE, "data", 0.02),
]


@pytest.mark.parametrize("attention,block,layout,error", CASES, ids=lambda value: str(value).split(" ")[0])
def test_a_layer_stores_and_rebuilds_what_the_closed_form_says(
    tmp_path: Path, attention: str, block: str, layout: str, error: float
) -> None:
    """Two more layers: what they add to the peak, and to the step beyond what they add without recompute."""
    added: dict[str, tuple[float, ...]] = {}
    for tier in ("none", "selective", "full"):
        plans = [_both(tmp_path, attention, block, number, LAYOUTS[layout], tier) for number in (2, 4)]
        added[tier] = tuple((more - few) / 2 for few, more in zip(*plans, strict=True))
    for tier, (held, step, held_closed, step_closed) in added.items():
        assert abs(held_closed - held) < 0.045 * added["none"][0], tier
        again, again_closed = step - added["none"][1], step_closed - added["none"][3]
        assert again_closed == pytest.approx(again, rel=error, abs=1e-4), tier
    assert added["full"][0] < 0.8 * added["none"][0]


def _both(
    folder: Path, attention: str, block: str, number: int, layout: dict[str, Any], tier: str
) -> tuple[float, float, float, float]:
    """Peak bytes and step seconds, of the plan and in closed form."""
    model = MODEL.format(attention=attention, block=block, number=number)
    spec = write(folder, model=model, sequence=16384, batch=layout["data"])
    once: dict[str, Any] = {"zero": 1, "gather": "once", "reduce": "once", "expert": 8 if "moe" in block else 1}
    strategy = Strategy(micro_batch=1, stages=(number,), recompute=tier, **layout, **once)
    estimator = estimator_of(spec)
    plan = measured(spec, strategy, estimator.machine, memory_limit(spec))
    closed = estimator.estimate(strategy)
    return plan.ledger.peak, simulate(plan.plan, estimator.machine).seconds, closed.memory, closed.seconds
