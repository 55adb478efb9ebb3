"""Branch and bound against pricing everything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from titan.compiler.schedules.registry import SCHEDULES
from titan.compiler.search.candidates import Candidate, price
from titan.compiler.search.enumeration import enumerate_space
from titan.compiler.search.hopes import Hopes, scheduled
from titan.compiler.search.search import estimator_of, memory_limit
from titan.compiler.search.space import EXPERT_RULES, allowed, schedules, shardings
from titan.compiler.spec.legality import is_legal
from titan.compiler.strategy import Strategy

from tests.compiler.search.specs import SMALL, write

ONE_COPY = [name for name, row in SCHEDULES.items() if row.copies == 1 and name != "solved"]
MOE = SMALL.replace("12 * dense { ffn = 2816 }", "4 * moe { experts = 8, top_k = 2, shared = 1, ffn = 1024 }")


@pytest.mark.parametrize("model,memory", [(SMALL, 92), (SMALL, 5), (MOE, 92), (MOE, 5)])
def test_nothing_priced_is_faster(tmp_path: Path, model: str, memory: int) -> None:
    """Every candidate with every way to shard and every tier, by the closed forms: the fastest that fits is found."""
    spec = write(tmp_path, "tensor <= 4; context <= 2", model=model, memory=memory, batch=8)
    estimator, limit = estimator_of(spec), memory_limit(spec)
    space = enumerate_space(spec)
    changes = [
        (s, option, tier)
        for s in space.candidates
        for option in shardings(spec, s)
        for tier in allowed(spec, "recompute")
    ]
    everything = [
        replace(s, **option, recompute=tier)
        for s, option, tier in changes
        if is_legal(spec, replace(s, **option), EXPERT_RULES)
    ]
    estimates = [estimator.estimate(s) for s in everything]
    best = min(e.seconds for e in estimates if e.memory <= limit)
    found = price(spec, estimator, space, limit)
    assert found.fitting[0].estimate.seconds == pytest.approx(best, rel=1e-9)
    assert found.fitting[0].estimate.memory <= limit
    assert found.number < len(everything)


def test_bounds_hold(tmp_path: Path) -> None:
    """No candidate is faster than the bounds that it is looked for by."""
    spec = write(tmp_path, model=MOE, batch=16)
    estimator = estimator_of(spec)
    hopes = Hopes(spec, estimator, memory_limit(spec))
    for family in enumerate_space(spec).families:
        plain, sizes = family.plain, [batch.size for batch in family.batches]
        fills = [size * hopes.left(plain.pipeline, 16 // plain.data // size) for size in sizes]
        floor, *floors = estimator.floors(plain, sizes[-1], [0.0, *fills])
        for number in range(len(family.batches)):
            s = family.member(number, family.experts[0])
            left = hopes.left(s.pipeline, s.micro_batches)
            assert floors[number] <= estimator.open_bound(s, fill=left) * (1 + 1e-9)
            group = estimator.open_bound(family.member(number, family.experts[0]))
            for experts in family.experts:
                bound = estimator.bound(family.member(number, experts))
                assert floor <= bound * (1 + 1e-9) and group <= bound * (1 + 1e-9)
                assert bound <= estimator.estimate(family.member(number, experts)).seconds * (1 + 1e-9)


def test_no_schedule_gets_below_what_is_hoped(tmp_path: Path) -> None:
    """By closed form, by more than uneven phases explain, with one copy of the head; and many pipelines have one that
    comes near."""
    spec = write(tmp_path, "context = 1", batch=32)
    estimator, near, seen = estimator_of(spec), 0, 0
    hopes = Hopes(spec, estimator, memory_limit(spec))
    assert hopes.left(1, 8) == 1.0 and hopes.left(4, 16) == pytest.approx(1 / 6)
    for s in enumerate_space(spec).candidates:
        if s.pipeline > 1:
            estimate = estimator.estimate(s)
            hoped = hopes.seconds(s, estimate)
            assert estimator.bound(s, fill=hopes.left(s.pipeline, s.micro_batches)) <= hoped * (1 + 1e-9)
            rows = [row for row in schedules(spec, s.pipeline, s.micro_batches) if row[0] in ONE_COPY]
            others = [estimator.estimate(scheduled(spec, s, *row)).seconds for row in rows]
            assert min(others) >= 0.97 * hoped and min(others) <= estimate.seconds
            near, seen = near + (min(others) <= 1.05 * hoped), seen + 1
    assert seen > 20 and near > seen / 4


@pytest.mark.parametrize("offload", ["none", "activations"])
def test_ways_to_keep_state_are_priced_together_as_one_by_one(tmp_path: Path, offload: str) -> None:
    """What they share is worked out once: every figure is that of a strategy priced alone."""
    wishes = f"tensor <= 4; context <= 2; offload = {offload}"
    spec = write(tmp_path, wishes, model=MOE, batch=16)
    estimator, alone, number = estimator_of(spec), estimator_of(spec), 0
    for s in enumerate_space(spec).candidates:
        options = (*shardings(spec, s), {"zero": 3, "prefetch": 3})
        for tier in ("none", "full", "adaptive"):
            alike = estimator.alike(s.but(recompute=tier))
            for option, (found, estimate) in zip(options, map(alike, options), strict=True):
                assert found == replace(s, recompute=tier, **option)
                assert estimate == alone.estimate(found)
                number += 1
    assert number > 1000


def test_no_way_to_share_experts_gets_below_its_exchange(tmp_path: Path) -> None:
    """Nor below that of a way before it; and exchanges tell ways apart."""
    spec = write(tmp_path, "context <= 2", model=MOE, batch=16, nodes=2)
    estimator, higher = estimator_of(spec), 0
    for family in enumerate_space(spec).families:
        for number in range(len(family.batches)):
            s = family.member(number, family.experts[0])
            ways = estimator.exchanges(s, family.experts)
            assert sorted(way for _, *way in ways) == sorted(map(list, family.experts))
            for tier in ("none", "selective", "full"):
                floors = [estimator.open_bound(s, tier, exchange=seconds) for seconds, *_ in ways]
                assert floors == sorted(floors)
                for floor, (_, expert, width) in zip(floors, ways, strict=True):
                    bound = estimator.bound(s.but(expert=expert, expert_tensor=width), tier)
                    assert floor <= bound * (1 + 1e-9)
                    higher += floor > 1.01 * floors[0]
    assert higher > 100


def test_what_is_written_counts_hops_and_copies_but_not_alike_layers(tmp_path: Path) -> None:
    """Every hop of a ring is a segment in each layer; of alike layers of a chunk a few are written, unless elements are
    interleaved in pairs."""
    spec = write(tmp_path, "tensor <= 4; context <= 2", model=SMALL, memory=92, batch=8)
    estimate = estimator_of(spec).estimate(next(iter(enumerate_space(spec).candidates)))

    def written(**choices: Any) -> int:
        return Candidate(Strategy(**choices), replace(estimate, stage=64)).written

    alone = written()
    assert alone < 64 * 20
    assert written(context=16, context_form="ring") == 16 * alone
    assert written(context=16, context_form="ring", context_heads=4) == 4 * alone
    assert written(context=16, context_form="heads") == alone
    pairs = written(pipeline=2, schedule="dualpipe", micro_batches=4)
    assert pairs == 2 * 2 * 2 * 64 * 20  # ranks, copies, alone and in pairs
    assert written(pipeline=2, micro_batches=4) == 2 * alone
