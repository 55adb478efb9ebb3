"""Rings under a sliding window: steps, bytes and FLOPs against formulas, proofs against rings that leave out too much,
and the order that the search takes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from titan.compiler.cost.simulate import simulate
from titan.compiler.lower import lower
from titan.compiler.plan.program import Plan
from titan.compiler.plan.segment import Segment
from titan.compiler.plan.sizes import Sizes
from titan.compiler.search.search import search
from titan.compiler.spec.resolve import resolve
from titan.compiler.spec.schema import Spec
from titan.compiler.strategy import Strategy
from titan.compiler.verify.proofs import verify
from titan.grammar.parser import parse

from tests.compiler.passes.test_ring import block, sent

HEADS, KV_HEADS, WIDTH, SEQUENCE, LAYERS = 8, 2, 4, 480, 2


@cache
def spec(window: int) -> Spec:
    text = f"""
import clusters.local
model = model {{
    vocab = 32, hidden = 16, layers = {LAYERS} * dense {{ ffn = 24 }}, max_positions = {SEQUENCE}
    attention = gqa {{ heads = {HEADS}, kv_heads = {KV_HEADS}, head_dim = {WIDTH}, window = {window} }}
    rope = {{ theta = 10000 }}
}}
cluster = local.cpu with {{ devices_per_node = 16 }}
train {{ sequence = {SEQUENCE}, global_batch = 1, precision = fp32, data = synthetic(32) }}
"""
    return resolve(parse(text, "ring.titan"), Path())


@cache
def plan(window: int, context: int, order: str = "contiguous", form: str = "ring") -> Plan:
    return lower(spec(window), Strategy(context=context, context_form=form, context_order=order, stages=(LAYERS,)))


@pytest.mark.parametrize(
    ("window", "order", "steps"),
    [
        (60, "contiguous", 2),  # blocks of 60: the one before
        (61, "contiguous", 2),  # the last query before a block sees 60 keys of the one before
        (62, "contiguous", 3),
        (1, "contiguous", 1),
        (30, "zigzag", 3),  # chunks of 30: the steps 0, 1 and 7
        (300, "zigzag", 8),
    ],
)
def test_keys_travel_no_further_than_the_window(window: int, order: str, steps: int) -> None:
    """Each step but the first moves the keys and values of a rank once; backward as many again, and their gradients."""
    found, context = plan(window, 8, order), 8
    moved = LAYERS * (steps - 1) * 2 * SEQUENCE // context * KV_HEADS * WIDTH * 4
    assert sent(found, "F.c0") == ({"send": moved} if moved else {})
    assert sent(found, "B.c0") == ({"send": moved, "gradient": moved} if moved else {})
    assert {name: p.findings[:2] for name, p in verify(found).items() if not p.ok} == {}


@pytest.mark.parametrize("form", ["ring", "gathered", "heads"])
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("window", [30, 100, 479])
def test_flops_are_those_of_the_window(window: int, order: str, form: str) -> None:
    """Forward 2 products, backward 5, over S W - W^2 / 2 pairs, divided by the ranks."""
    context = 2 if form == "heads" else 4
    found = plan(window, context, order, form)
    sizes = Sizes(found)
    product = 2.0 * HEADS * WIDTH * (SEQUENCE * window - window**2 / 2) / context
    full = 2.0 * HEADS * WIDTH * SEQUENCE**2 / 2 / context
    whole = plan(SEQUENCE, context, order, form)
    for name, number in (("F.c0", 2), ("B.c0", 5)):
        work, most = (
            sum(Sizes(p).flops(i) for i in block(p, name).instructions if sizes.runs(i)) for p in (found, whole)
        )
        assert most - work == pytest.approx(LAYERS * number * (full - product), rel=1e-9)


def _with_window(found: Plan, window: int) -> Plan:
    """The same steps under another window: as if the plan had left out what it now needs, or kept what it does not."""

    def changed(segment: Segment) -> Segment:
        body = tuple(
            replace(call, attributes=tuple({**dict(call.attributes), "window": window}.items()))
            if "ring" in dict(call.attributes)
            else call
            for call in segment.body
        )
        return replace(segment, body=body)

    return replace(found, segments=tuple(map(changed, found.segments)))


@pytest.mark.parametrize("window", [62, 1])
def test_a_ring_that_visits_other_blocks_than_the_window_needs_is_refused(window: int) -> None:
    found = plan(60, 8)
    assert all(proof.ok for proof in verify(found).values())
    assert not verify(_with_window(found, window))["gradients"].ok


def test_a_window_takes_less_time() -> None:
    narrow, wide = (simulate(plan(window, 8)).seconds for window in (30, SEQUENCE))
    assert narrow < wide


@pytest.mark.parametrize(("window", "order"), [("1024", "contiguous"), ("none", "zigzag")])
def test_the_order_of_the_ring_is_chosen_by_price(window: str, order: str) -> None:
    """With a window natural order visits fewer blocks; without one zigzag has equal work."""
    text = f"""
import clusters.nvidia
import models.mistral
model = mistral.mistral_7b with {{ layers = 2 * dense {{ ffn = 14336 }}, attention.window = {window} }}
cluster = nvidia.dgx_h100
train {{ sequence = 32Ki, global_batch = 1, precision = bf16, data = tokens("corpus.tokens") }}
parallel {{ context = 8, context_form = ring, context_heads = 1 }}
"""
    result = search(resolve(parse(text, "order.titan"), Path()))
    assert result.strategy.context_order == order
    (reason,) = [text for key, _, text in result.strategy.reasons if key == "context_order"]
    assert "more" in reason and (("steps" in reason) == (window != "none"))
