"""Solved orders: never worse than a named schedule, within each rank's memory, near the optimum where it is known."""

from __future__ import annotations

import json
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from titan.compiler.schedules.exact import optimum
from titan.compiler.schedules.improve import improve
from titan.compiler.schedules.listing import Costs, Policy, list_order, sequence_of, usage
from titan.compiler.schedules.order import Element, Order
from titan.compiler.schedules.solved import (
    NAMED,
    candidates,
    in_turn,
    lower_bound,
    named,
    placements,
    solve,
    span_bubble,
)
from titan.compiler.schedules.timetable import Durations, StalledOrder, timetable

from tests.conftest import GOLDEN

FIXTURES = GOLDEN.parent / "fixtures"
EFFORT = 4_000


def uneven(ranks: int, chunks: int, seed: int, transfer: float = 0.1) -> Durations:
    """Layers of different sizes, a head, phases that differ."""
    random = Random(seed)
    sizes = [random.choice((0.5, 1.0, 1.5)) for _ in range(ranks * chunks)]
    sizes[-1] += random.choice((0.0, 0.7))
    phases = (1.0, random.uniform(0.9, 1.4), random.uniform(0.6, 1.0))
    return Durations(*(tuple(round(phase * s, 3) for s in sizes) for phase in phases), transfer=transfer)


def step(order: Order, durations: Durations) -> float:
    return timetable(order, durations).makespan


@settings(max_examples=12, deadline=None)
@given(
    ranks=st.integers(2, 4), micro_batches=st.integers(2, 7), chunks=st.integers(1, 2), seed=st.integers(0, 99),
    share=st.sampled_from((0.7, 1.0, 2.0)),
)  # fmt: skip
def test_never_worse_than_a_named_schedule(
    ranks: int, micro_batches: int, chunks: int, seed: int, share: float
) -> None:
    durations = uneven(ranks, chunks, seed)
    limit = float(max(int(ranks * chunks * share), chunks))
    costs = Costs(durations, (1.0,) * (ranks * chunks), (limit,) * ranks)
    found = solve(ranks, micro_batches, costs, EFFORT)
    assert costs.fits(found)
    time = step(found, durations)
    assert time >= lower_bound(found.placement, micro_batches, durations) - 1e-9
    for order in named(ranks, micro_batches, chunks):
        try:
            other = step(order, durations)
        except StalledOrder:
            continue
        assert time <= other + 1e-9 or not costs.fits(order)


@settings(max_examples=20, deadline=None)
@given(
    ranks=st.integers(2, 4), micro_batches=st.integers(2, 7), chunks=st.integers(1, 2), seed=st.integers(0, 99),
)  # fmt: skip
def test_micro_batches_in_turn_come_no_later(ranks: int, micro_batches: int, chunks: int, seed: int) -> None:
    durations = uneven(ranks, chunks, seed)
    costs = Costs(durations, (1.0,) * (ranks * chunks), (1.5 * ranks * chunks,) * ranks)
    fitting = [order for order in candidates(ranks, micro_batches, costs) if costs.fits(order)]
    before = improve(Random(seed).choice(fitting), costs, EFFORT, Random(seed))
    after = in_turn(before)
    assert usage(after, costs.frames) == usage(before, costs.frames)
    for rank, program in enumerate(after.ranks):
        slots = [(e.phase, e.chunk) for e in after.elements(rank)]
        assert slots == [(e.phase, e.chunk) for e in before.elements(rank)] and len(program) == len(before.ranks[rank])
        for kinds in ("F", "BI", "W"):
            for chunk in {c for _, c in slots}:
                found = [e.micro_batch for e in after.elements(rank) if e.phase in kinds and e.chunk == chunk]
                assert found == sorted(set(found))
    earlier, later = timetable(after, durations), timetable(before, durations)
    for mine, theirs in zip(earlier.ends, later.ends, strict=True):
        assert all(a <= b + 1e-9 for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_no_candidate_beats_the_lower_bound(seed: int) -> None:
    durations = uneven(3, 2, seed)
    costs = Costs(durations, (1.0,) * 6, (8.0,) * 3)
    seen = 0
    for order in candidates(3, 6, costs):
        assert step(order, durations) >= lower_bound(order.placement, 6, durations) - 1e-9
        seen += 1
    assert seen > len(NAMED)


def test_S_SCH_06_each_stage_stays_below_its_own_limit() -> None:
    """Four stages with limits of 70, 80, 80 and 70: micro-batches of ten each."""
    limits = (70.0, 80.0, 80.0, 70.0)
    costs = Costs(uneven(4, 1, 5), (10.0,) * 4, limits)
    found = solve(4, 12, costs, EFFORT)
    peaks = usage(found, costs.frames)
    assert all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))
    tight = (30.0, 20.0, 20.0, 10.0)
    peaks = usage(solve(4, 12, Costs(costs.durations, costs.frames, tight), EFFORT), costs.frames)
    assert all(peak <= limit for peak, limit in zip(peaks, tight, strict=True))


def test_a_limit_below_one_micro_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="one micro-batch"):
        solve(2, 4, Costs.unit(2, 2, 0.5), EFFORT)


@pytest.mark.parametrize("micro_batches", [1, 2, 5, 9])
@pytest.mark.parametrize("placement", placements(3, 2))
def test_list_schedules_keep_order_and_memory(placement: tuple[int, ...], micro_batches: int) -> None:
    """With the least memory that lets a micro-batch through, ranks never block each other."""
    costs = Costs(uneven(3, 2, 1), (1.0, 2.0, 1.0, 3.0, 1.0, 1.0), ())
    for slack in (0.0, 1.0, 4.0):
        least = tuple(sum(costs.frames[c] for c in range(6) if placement[c] == r) + slack for r in range(3))
        limited = Costs(costs.durations, costs.frames, least)
        for policy in (Policy(), Policy(1.0, (), (3, 2, 1)), Policy(0.0, (), (2, 2, 2), False)):
            order = list_order(placement, micro_batches, limited, policy)
            assert order is not None and limited.fits(order)
            timetable(order, costs.durations)
            everything = {Element(phase, c, i) for phase in "FIW" for c in range(6) for i in range(micro_batches)}
            assert {e for rank in range(3) for e in order.elements(rank)} == everything
            again = list_order(placement, micro_batches, limited, Policy(0.0, sequence_of(order)))
            assert again is not None and sequence_of(again) == sequence_of(order)


CASES = [(2, 2, 1, 2), (2, 4, 1, 3), (3, 3, 1, 3), (3, 4, 1, 3), (2, 2, 2, 4), (2, 3, 2, 3)]


@pytest.mark.parametrize(("ranks", "micro_batches", "chunks", "limit"), CASES)
def test_the_distance_to_the_exact_optimum(ranks: int, micro_batches: int, chunks: int, limit: int) -> None:
    pytest.importorskip("scipy")
    durations = uneven(ranks, chunks, 3)
    costs = Costs(durations, (1.0,) * (ranks * chunks), (float(limit),) * ranks)
    found = solve(ranks, micro_batches, costs, 20_000)
    time = step(found, durations)
    exact = optimum(found.placement, micro_batches, costs, time * (1 + 1e-9), seconds=20)
    assert exact is not None and exact.proven and costs.fits(exact.order)
    assert lower_bound(found.placement, micro_batches, durations) <= exact.bound + 1e-6
    print(f"{ranks} ranks, {micro_batches} micro-batches: {time:.4g}, optimum {exact.seconds:.4g}")
    assert exact.seconds - 1e-6 <= time <= 1.05 * exact.seconds


def test_a_llama_like_model_leaves_the_most_loaded_rank_no_bubble() -> None:
    """Embedding and head counted, 1F1B's memory: at most one percent within the span of the most loaded rank."""
    written = json.loads((FIXTURES / "llama_chunk_times.json").read_text(encoding="utf-8"))
    ranks, micro_batches = written["ranks"], written["micro_batches"]
    phases = (tuple(chunk[k] for chunk in written["chunks"]) for k in range(3))
    durations = Durations(*phases, transfer=written["transfer"])
    costs = Costs(durations, (1.0,) * (2 * ranks), (2.0 * ranks,) * ranks)
    order = solve(ranks, micro_batches, costs, effort=0)
    assert costs.fits(order) and span_bubble(order, durations) <= 0.01
    assert step(order, durations) <= 1.001 * lower_bound(order.placement, micro_batches, durations)
    best = min(step(o, durations) for o in named(ranks, micro_batches, 2) if costs.fits(o))
    assert step(order, durations) < best
