"""Situations from public reports about dividing the sequence; each test bears the id of its case."""

from __future__ import annotations

import pytest

from tests.compiler.spec.writing import errors, only, spec_text
from tests.compiler.test_cases_plan import told


def test_S_SEQ_01_unequal_shards_are_refused_with_both_numbers() -> None:
    text = spec_text("tensor = 4, context = 1, sequence_parallel = true", devices=4, sequence="8193")
    found = only(errors(text))
    assert found.code == "T244" and "8193" in told(found) and "4" in told(found)
    assert "sequence = 8196" in found.nearest


@pytest.mark.parametrize(
    ("sequence", "context", "tensor", "accepted"),
    [("8200", 4, 8, False), ("8224", 4, 8, True), ("4100", 2, 2, True), ("4098", 2, 2, False)],
)
def test_S_SEQ_02_the_ring_s_piece_is_divided_again(sequence: str, context: int, tensor: int, accepted: bool) -> None:
    """The factor is context x lcm(2, tensor): zigzag halves and tensor ranks both divide what a context rank holds."""
    wishes = f"context = {context}, tensor = {tensor}, pipeline = 1, data = 1, context_form = ring"
    fixed = "context_heads = 1, context_order = zigzag, sequence_parallel = true"
    text = spec_text(f"{wishes}, {fixed}", devices=context * tensor, sequence=sequence, batch="8")
    found = errors(text)
    assert (not found) == accepted
    if not accepted:
        assert str(context * tensor) in told(found[0]) and sequence in told(found[0])


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
