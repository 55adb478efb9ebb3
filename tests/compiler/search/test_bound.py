"""The bounds of the search against simulated plans of every kind, and against values worked out by hand."""

from __future__ import annotations

import random
from math import inf
from pathlib import Path

import pytest
from titan.compiler.cost.estimate import Estimator
from titan.compiler.cost.memory import memory_ledger
from titan.compiler.cost.simulate import simulate
from titan.compiler.lower import lower
from titan.compiler.search.bound import MARGIN, Bounds, Piece, least_step
from titan.compiler.search.candidates import Candidate
from titan.compiler.search.enumeration import enumerate_space
from titan.compiler.search.forced import Tier, forced, rebuild
from titan.compiler.search.orders import finished
from titan.compiler.search.search import estimator_of, memory_limit, search
from titan.compiler.spec.schema import Spec

from tests.benchmarks.search import every, problem, read
from tests.compiler.search.specs import SMALL, write

WISHES = (
    "zero <= 3",
    "schedule in [one_f_one_b, gpipe]",
    "schedule in [dualpipe, dualpipe_v, interleaved]",
    "schedule in [zero_bubble_h2, zero_bubble_v]; late_check = true",
)
MOE = SMALL.replace("12 * dense { ffn = 2816 }", "4 * moe { experts = 8, top_k = 2, shared = 1, ffn = 1024 }")


@pytest.mark.parametrize("wishes", WISHES)
def test_no_simulated_plan_of_a_random_problem_is_faster(wishes: str) -> None:
    """Of the strategy's own bound neither: a strategy's holds for it, the least one for all."""
    random_ = random.Random(wishes)
    tried = 0
    while tried < 12:
        spec = read(problem(random_) | {"wishes": wishes.replace("; ", "\n    ")})
        tried += check(spec, random_, 4)


def test_no_simulated_plan_with_experts_is_faster(tmp_path: Path) -> None:
    spec = write(tmp_path, "zero <= 3", model=MOE, devices=4, batch=8)
    assert check(spec, random.Random(0), 12) == 12


def test_no_simulated_plan_in_little_memory_is_faster(tmp_path: Path) -> None:
    """Of the memory that the thriftiest plan needs twice as much: recompute is forced on most of the others."""
    spec = write(tmp_path, "recompute = auto", devices=4, batch=16, memory=4)
    assert check(spec, random.Random(1), 60) >= 5


def check(spec: Spec, random_: random.Random, number: int) -> int:
    strategies = list(dict.fromkeys(s for s in every(spec) if s.schedule != "solved"))
    estimator, limit = estimator_of(spec), memory_limit(spec)
    if not strategies:
        return 0
    bounds, least = Bounds(spec, estimator, limit), least_step(spec, estimator, enumerate_space(spec), limit)
    fitting = 0
    for s in random_.sample(strategies, min(number, len(strategies))):
        plan = lower(spec, finished(Candidate(s, estimator.estimate(s)), estimator, limit))
        if memory_ledger(plan, estimator.machine, limit).verdict != "does not fit":
            fitting += 1
            assert 0 < least <= bounds.member(s) * (1 - MARGIN) <= simulate(plan, estimator.machine).seconds
    return fitting


def test_stages_that_fill_and_drain_take_what_the_textbook_says(tmp_path: Path) -> None:
    """With a forward as short as can be 1F1B takes m + p - 1 stages' times; one micro-batch takes the whole model's."""
    bounds = Bounds(*_problem(tmp_path))
    layer, head = Piece(0.0, 3.0, 0.0, 0.0, 1.0), Piece(0.0, 1e-12, 0.0, 0.0, 0.0)
    for stages, micro_batches in ((2, 4), (4, 4), (4, 32)):
        even = 12 / stages * 3.0
        assert bounds._filled(stages, micro_batches, layer, head) == pytest.approx((micro_batches + stages - 1) * even)
    assert bounds._filled(4, 1, layer, head) == pytest.approx(36.0)


def test_the_fullest_stage_holds_whole_layers(tmp_path: Path) -> None:
    """12 layers of 1 s on 5 stages: one has 3; a head of 2 s takes the place of two of them on the last."""
    bounds = Bounds(*_problem(tmp_path))
    assert bounds._fullest(5, 1.0, 0.0) == 3.0
    assert bounds._fullest(4, 1.0, 2.0) == 4.0
    assert bounds._fullest(1, 1.0, 2.0) == 14.0


def test_a_stage_recomputes_what_it_has_no_room_for() -> None:
    """Ten layers of 8 bytes in 50: half of what the tiers save between 8 and 2 bytes, at 3 s a layer and micro-batch.
    A link of 1 byte/s takes ever more of it to the host; and stages that hold a frame for long hold fewer at once."""
    tiers = (Tier(8.0, 0.0), Tier(2.0, 3.0))
    assert forced(tiers, 50.0, 0.0, 10, 1, 4, 100.0, 1.0) == pytest.approx(4 * 10 * 1.5, rel=1e-3)
    assert forced(tiers, 50.0, 1.2, 10, 1, 4, 100.0, 1.0) == 0.0
    assert forced(tiers, 19.0, 0.0, 10, 1, 4, 100.0, 1.0) == inf
    # m n^2 y / (2 p room) = 400 / 320 s of a step for each byte: 8 bytes need 10 of the 20 s
    assert forced(tiers, 80.0, 0.0, 10, 2, 4, 20.0, 1.0) == 0.0
    # 5 s for each byte: a = 20 / 3 is where 5 a = 20 + 20 (8 - a) / 2
    assert forced(tiers, 20.0, 0.0, 10, 2, 4, 20.0, 1.0) == pytest.approx(40 / 3, rel=1e-3)
    assert rebuild(tiers, 5.0) == 1.5


def test_pins_raise_the_bound(tmp_path: Path) -> None:
    """What wishes rule out is no longer in it: with as many stages as micro-batches 1F1B idles nearly half the time."""
    free = search(write(tmp_path, devices=4, batch=4))
    pinned = search(write(tmp_path, "pipeline = 4; schedule = one_f_one_b", devices=4, batch=4))
    assert free.bound <= free.timeline.seconds < 1.7 * free.bound
    assert pinned.bound > 1.4 * free.bound
    assert pinned.timeline.seconds < 1.3 * pinned.bound


def _problem(tmp_path: Path) -> tuple[Spec, Estimator, int]:
    spec = write(tmp_path)
    return spec, estimator_of(spec), memory_limit(spec)
