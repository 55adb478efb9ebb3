"""Situations from public reports about data that ends; each test bears the id of its case."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from titan.compiler.lower import lower
from titan.compiler.strategy import Strategy
from titan.runtime.data import FileSource
from titan.runtime.tokenfile import TokenWriter, open_tokens

from tests.compiler.spec.writing import resolved, spec_text


def test_S_LAU_04_no_rank_has_less_data_than_another(tmp_path: Path) -> None:
    """84 samples, two data ranks, 45 steps of two: data belongs to no rank, every rank loads as often in each step, and
    beyond the last sample the next epoch begins for all of them at once."""
    spec = resolved(spec_text("data = 2", devices=2, batch="2"))
    plan = lower(spec, Strategy(data=2, stages=(8,)))
    loads = []
    for role in plan.roles:
        calls = Counter(call.block for call in role.order("train"))
        loads.append(sum(calls[b.name] for b in role.blocks for i in b.instructions if i.opcode == "load_batch"))
    assert len(set(loads)) == 1 and loads[0] > 0
    with TokenWriter(tmp_path / "short.tokens", 1000, "byte") as writer:
        writer.append(list(range(84 * 8 + 1)))
        writer.publish()
    source = FileSource(open_tokens(tmp_path / "short.tokens"), 8, seed=3)
    assert source.samples == 84
    for rank in range(2):
        seen = [source.locate(2 * step + rank) for step in range(45)]
        assert len(seen) == 45  # 42 of the first epoch, three of the second
        tokens, labels = source.load((2 * 44 + rank,), 0, 8)
        assert tokens.shape == labels.shape == (1, 8) and (labels == tokens + 1).all()
    assert len({source.locate(index) for index in range(84)}) == 84
