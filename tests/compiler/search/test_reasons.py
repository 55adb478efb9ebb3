"""Reasons of choices where the alternatives were not timed."""

from __future__ import annotations

from pathlib import Path

from titan.compiler.search.candidates import Candidate
from titan.compiler.search.reasons import reasons
from titan.compiler.search.search import estimator_of, memory_limit
from titan.compiler.strategy import Strategy

from tests.compiler.search.specs import write


def test_another_schedule_may_have_other_chunks(tmp_path: Path) -> None:
    """A split for two chunks per rank says nothing of schedules with one."""
    spec = write(tmp_path)
    estimator = estimator_of(spec)
    strategy = Strategy(pipeline=8, micro_batches=64, schedule="dualpipe_v", stages=(1,) * 12 + (0,) * 4)
    chosen = Candidate(strategy, estimator.estimate(strategy))
    found = {key: why for key, _, why in reasons(spec, estimator, chosen, (), memory_limit(spec))}
    assert found["schedule"].startswith("schedule = one_f_one_b takes ")
