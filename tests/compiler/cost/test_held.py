"""What ranks hold under a schedule in closed form, beside the plan, whose ledger is exact."""

from __future__ import annotations

import pytest
from titan.compiler.cost.held import frames_held
from titan.compiler.cost.memory import memory_ledger
from titan.compiler.lower import lower
from titan.compiler.schedules.registry import SCHEDULES
from titan.compiler.search.search import estimator_of
from titan.compiler.spec.schema import Spec
from titan.compiler.strategy import Strategy

from tests.compiler.spec.writing import resolved, spec_text

SPLIT = tuple(name for name, row in SCHEDULES.items() if row.splits and row.size is None and name != "solved")


@pytest.fixture(scope="module")
def spec() -> Spec:
    model = "model = llama.llama2_7b with { layers = 16 * dense { ffn = 11008 } }"
    text = spec_text(model=model, train="precision = bf16", sequence="4096", batch="48")
    return resolved(text)


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("schedule", SPLIT)
def test_the_closed_form_of_memory_follows_plans_of_split_backwards(spec: Spec, schedule: str, zero: int) -> None:
    """Operands of weight gradients, whole gradients, gathered parameters: within 15 %, without recompute and with."""
    stages = 4 * SCHEDULES[schedule].chunks
    for tier in ("none", "full"):
        strategy = Strategy(
            pipeline=4, data=4, zero=zero, schedule=schedule, recompute=tier, micro_batches=12,
            stages=(16 // stages,) * stages,
        )  # fmt: skip
        held = memory_ledger(lower(spec, strategy)).peak
        assert estimator_of(spec).estimate(strategy).memory == pytest.approx(held, rel=0.15), tier


def test_frames_between_the_halves_of_a_backward_by_hand() -> None:
    """ZB-H1 on 4 ranks: the first holds 4 whole frames, the last has run one I for each of 4 that no W has ended."""
    assert frames_held("zero_bubble_h1", 4, 0, 16, 1)[-1] == (4, 0)
    assert frames_held("zero_bubble_h1", 4, 3, 16, 1)[0] == (0, 4)
    assert frames_held("one_f_one_b", 4, 1, 16, 1) == ((3, 0),)


@pytest.mark.parametrize("schedule", SPLIT)
def test_frames_of_long_pipelines_are_those_of_their_orders(schedule: str) -> None:
    """Bytes of the ends of 32 ranks, where a split frame takes a quarter more, as the order shows them."""
    row = SCHEDULES[schedule]
    order = row.order(32, 64)
    for rank in (0, 31):
        kept = split = most = 0.0
        for element in order.elements(rank):
            kept += {"F": 1, "B": -1, "I": -1}.get(element.phase, 0)
            split += {"I": 1, "W": -1}.get(element.phase, 0)
            most = max(most, (kept + 1.25 * split) / order.placement.count(rank))
        found = max(f + 1.25 * w for f, w in frames_held(schedule, 32, rank, 64, row.chunks))
        assert found == pytest.approx(most, rel=0.045), rank


@pytest.mark.parametrize("tier", ["none", "selective"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_the_closed_form_counts_what_heads_hold_when_they_are_exchanged_back(
    spec: Spec, tensor: int, tier: str
) -> None:
    """What was mixed is kept before and after: by so much a ring of heads holds more than one without."""
    held, formed = [], []
    for heads in (1, 2):
        strategy = Strategy(
            pipeline=4, data=4 // tensor, context=4, tensor=tensor, sequence_parallel=tensor > 1, context_form="ring",
            context_heads=heads, recompute=tier, micro_batches=12 * tensor, stages=(4, 4, 4, 4), zero=1,
        )  # fmt: skip
        held.append(memory_ledger(lower(spec, strategy)).peak)
        formed.append(estimator_of(spec).estimate(strategy).memory)
    assert formed[1] - formed[0] == pytest.approx(held[1] - held[0], rel=0.1)
    assert formed[1] == pytest.approx(held[1], rel=0.035)


def test_long_pipelines_hold_what_short_ones_show() -> None:
    """Of 32 ranks the ends hold as many frames as those of 8 do of theirs, four times as many."""
    for rank, few in ((0, 0), (31, 7)):
        many, sample = frames_held("zero_bubble_h1", 32, rank, 128, 1), frames_held("zero_bubble_h1", 8, few, 32, 1)
        assert many == tuple((4 * f, 4 * w) for f, w in sample)
