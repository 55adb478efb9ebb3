"""Every schedule trains like one process: on loopback, with uneven stages, tied embeddings and dropout."""

from __future__ import annotations

import pytest
from titan.compiler.schedules.registry import SCHEDULES

from tests.equivalence.schedules import fewest, mismatches


@pytest.mark.parametrize("name", SCHEDULES)
def test_four_ranks_with_as_few_micro_batches_as_it_takes(name: str) -> None:
    micro_batches = fewest(name, 4)
    assert micro_batches is not None
    assert mismatches(name, 4, micro_batches) == []


@pytest.mark.parametrize("name", SCHEDULES)
def test_two_ranks_with_sharded_state_and_a_ragged_number(name: str) -> None:
    micro_batches = fewest(name, 2, 5)
    assert micro_batches is not None
    assert mismatches(name, 2, micro_batches, zero=1, steps=1) == []


@pytest.mark.parametrize(("name", "ranks"), [("zero_bubble_v", 16), ("dualpipe", 8), ("interleaved", 7), ("solved", 3)])
def test_more_ranks(name: str, ranks: int) -> None:
    micro_batches = fewest(name, ranks)
    assert micro_batches is not None
    assert mismatches(name, ranks, micro_batches, steps=1) == []


@pytest.mark.parametrize("name", ["one_f_one_b", "gpipe"])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 7])
def test_S_SCH_02_fewer_micro_batches_than_stages_run(name: str, micro_batches: int) -> None:
    assert mismatches(name, 4, micro_batches, steps=1) == []


def test_S_SCH_04_interleaving_on_two_ranks_runs() -> None:
    """Sends to the next and to the previous rank go to the same peer there."""
    assert mismatches("interleaved", 2, 4) == []


def test_S_LOSS_01_accumulating_more_does_not_shrink_earlier_gradients() -> None:
    """Twelve micro-batches on one rank, and on two ranks as 1F1B: one sum, divided once."""
    assert mismatches("one_f_one_b", 2, 12) == []
