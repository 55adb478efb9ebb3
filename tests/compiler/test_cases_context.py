"""Situations from public reports about dividing the sequence; each test bears the id of its case."""

from __future__ import annotations

from math import lcm

import pytest
from titan.compiler.spec.padding import padded, sequence_unit

from tests.compiler.spec.writing import Layout, errors, only, problems, spec_text
from tests.compiler.test_cases_plan import told

MIXTURE = """model {
    vocab = 1024, hidden = 64, max_positions = 64Ki, rope = { theta = 10000 }
    attention = gqa { heads = 16, kv_heads = 16, head_dim = 16 }
    layers = 8 * moe { experts = 8, top_k = 2, ffn = 192 }
}"""


def test_S_SEQ_01_unequal_shards_are_filled_up_and_said_with_all_numbers() -> None:
    text = spec_text("tensor = 4, context = 1, sequence_parallel = true", devices=4, sequence="8193")
    found = only(problems(text))
    assert (found.code, found.severity) == ("T310", "warning")
    assert all(number in told(found) for number in ("8193", "8196", "4", "3 masked places"))
    assert "sequence = 8196" in found.nearest


def test_S_SEQ_01_where_padding_cannot_work_both_numbers_are_said() -> None:
    fixed = "tensor = 4, context = 1, sequence_parallel = true, context_form = gathered, context_heads = 1"
    wishes = f"{fixed}, context_order = zigzag"
    found = only(errors(spec_text(wishes, devices=4, sequence="8193", model=MIXTURE)))
    assert found.code == "T244" and "8193" in told(found) and "4" in told(found)
    assert "sequence = 8196" in found.nearest


@pytest.mark.parametrize(
    ("sequence", "context", "tensor", "accepted"),
    [("8200", 4, 8, False), ("8224", 4, 8, True), ("4100", 2, 2, True), ("4098", 2, 2, False)],
)
def test_S_SEQ_02_the_ring_s_piece_is_divided_again(sequence: str, context: int, tensor: int, accepted: bool) -> None:
    """The factor is context x lcm(2, tensor): zigzag halves and tensor ranks both divide what a context rank holds. A
    mixture's sequence is refused, any other filled up to the next multiple."""
    wishes = f"context = {context}, tensor = {tensor}, pipeline = 1, data = 1, context_form = ring"
    fixed = "context_heads = 1, context_order = zigzag, sequence_parallel = true"
    text = {"devices": context * tensor, "sequence": sequence, "batch": "8"}
    found = errors(spec_text(f"{wishes}, {fixed}, expert = 1, expert_tensor = {tensor}", model=MIXTURE, **text))
    assert (not [f for f in found if f.code == "T244"]) == accepted
    warned = problems(spec_text(f"{wishes}, {fixed}", **text))
    assert (not warned) == accepted
    s = Layout(context=context, tensor=tensor, sequence_parallel=True, context_form="ring")
    factor = context * lcm(2, tensor)
    assert sequence_unit(s) == factor and padded(int(sequence), s) == -(-int(sequence) // factor) * factor
    if not accepted:
        for told_ in (told(next(f for f in found if f.code == "T244")), told(only(warned))):
            assert str(factor) in told_ and sequence in told_


@pytest.mark.parametrize("context", [8, 16, 40])
def test_S_GQA_04_a_ring_has_no_limit_by_heads(context: int) -> None:
    """40 heads and 8 KV heads: head exchange ends at 8 ranks; a ring goes on, alone or with heads exchanged inside."""
    model = {"heads": 40, "kv_heads": 8, "sequence": "64000", "layers": 2, "batch": "8"}
    wishes = f"context = {context}, tensor = 1, pipeline = 1, data = 1"
    exchange = errors(spec_text(f"{wishes}, context_form = heads", devices=context, **model))
    assert bool(exchange) == (context > 8)
    if exchange:
        assert "context_form = ring" in only(exchange).nearest and "40" in told(only(exchange))
    for heads in (1, 4):
        ring = f"{wishes}, context_form = ring, context_heads = {heads}, context_order = zigzag"
        assert errors(spec_text(ring, devices=context, **model)) == ()
