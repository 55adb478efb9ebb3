"""Deep pipelines and many micro-batches: every schedule is lowered and proven."""

from __future__ import annotations

import pytest
from titan.compiler.lower import lower
from titan.compiler.schedules.registry import SCHEDULES
from titan.compiler.strategy import Strategy
from titan.compiler.verify.proofs import verify

from tests.compiler.schedules.small import small_spec

NAMED = [name for name in SCHEDULES if name != "solved"]


@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches"), [*((name, 32, 64) for name in NAMED), ("one_f_one_b", 64, 128)]
)
def test_deep_pipelines_are_proven(name: str, ranks: int, micro_batches: int) -> None:
    chunks = ranks * SCHEDULES[name].chunks
    spec = small_spec(layers=chunks, batch=micro_batches, devices=ranks)
    strategy = Strategy(pipeline=ranks, micro_batches=micro_batches, schedule=name, stages=(1,) * chunks)
    found = verify(lower(spec, strategy))
    assert {key: proof.findings for key, proof in found.items() if not proof.ok} == {}
