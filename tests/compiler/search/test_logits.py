"""Logits kept where they fit, and shardings of small plans, against simulating every plan of the space."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from titan.compiler.cost.memory import memory_ledger
from titan.compiler.cost.simulate import simulate
from titan.compiler.lower import lower
from titan.compiler.search.enumeration import enumerate_space
from titan.compiler.search.search import estimator_of, memory_limit, search
from titan.compiler.search.space import shardings

from tests.compiler.search.specs import least_memory, write

LARGE = "model { vocab = 128000, hidden = 1024, max_positions = 4096, attention = gqa { heads = 16, kv_heads = 4 }"
MODEL = LARGE + ", layers = 4 * dense { ffn = 2816 }, rope = { theta = 10000 } }"


def test_large_logits_are_kept_where_they_fit_and_the_best_sharding_is_found(tmp_path: Path) -> None:
    """16 sequences of 2,048 words of 128,000: logits in pieces would be formed twice. All plans are simulated."""
    spec = write(tmp_path, "pipeline = 1; tensor = 1; context = 1; recompute = none", model=MODEL, batch=32, devices=2)
    found, limit, machine = search(spec), memory_limit(spec), estimator_of(spec).machine
    fastest = []
    for s in enumerate_space(spec).candidates:
        for option in shardings(spec, s):
            plan = lower(spec, replace(s, loss_rows=0, stages=(4,), **option))
            if memory_ledger(plan, machine, limit).verdict == "fits":
                fastest.append(simulate(plan, machine).seconds)
    assert found.strategy.loss_rows == 0
    assert found.timeline.seconds <= min(fastest) * (1 + 1e-9)
    pieces = lower(spec, replace(found.strategy, loss_rows=512))
    assert simulate(pieces, machine).seconds > found.timeline.seconds


def test_logits_that_do_not_fit_are_formed_in_pieces(tmp_path: Path) -> None:
    """In a little less than the smallest plan takes that keeps them."""
    wishes = "pipeline = 1; tensor = 1; micro_batch = 16"
    plenty = write(tmp_path, wishes, model=MODEL, batch=32, devices=2)
    least = least_memory(plenty, loss_rows=0, stages=(4,))
    percent = (100 * least - 1) // plenty.cluster.device.memory
    spec = write(tmp_path, wishes, model=MODEL, batch=32, devices=2, memory=percent)
    found = search(spec)
    assert found.strategy.loss_rows > 0 and found.ledger.verdict == "fits"
    kept = memory_ledger(lower(spec, replace(found.strategy, loss_rows=0)), limit=memory_limit(spec))
    assert kept.verdict != "fits"


@pytest.mark.parametrize("rows", [0, 256])
def test_a_wish_for_logits_is_kept(tmp_path: Path, rows: int) -> None:
    wishes = f"pipeline = 1; tensor = 1; loss_rows = {rows}"
    assert search(write(tmp_path, wishes, model=MODEL, batch=8, devices=2)).strategy.loss_rows == rows
