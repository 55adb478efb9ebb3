"""Bubbles and activations of every schedule against the closed forms of their papers, in the timetable of the order."""

from __future__ import annotations

from collections import Counter
from math import ceil
from random import Random

import pytest
from titan.compiler.schedules.order import Order, Pair, Schedule, Times
from titan.compiler.schedules.registry import SCHEDULES, legal_counts
from titan.compiler.schedules.timetable import Durations, Timetable, peak_frames, timetable

EXACT = {
    "v_half": 0.06,
    "v_min": 0.035,
    "dualpipe": 0.04,
}  # how well steps of unequal phases are told; others within 2.5 %
UNIT = Times(1.0, 1.0, 1.0)
RANKS = (2, 4, 8, 16)


def grid(ranks: int) -> tuple[int, ...]:
    sizes = {1, 2, 3, ranks - 1, ranks, ranks + 1, 2 * ranks - 1, 2 * ranks, 2 * ranks + 2, 3 * ranks, 4 * ranks + 1}
    return tuple(sorted({*sizes, 8 * ranks}))


def run(schedule: Schedule, ranks: int, micro_batches: int, chunks: int = 0) -> tuple[Order, Timetable]:
    """F = I = W = 1 for a rank's whole share."""
    order = schedule.order(ranks, micro_batches, chunks)
    share = (chunks or schedule.chunks) * schedule.copies
    return order, timetable(order, Durations.unit(len(order.placement), schedule.copies / share))


# name -> (flush bubble, span bubble of the worst rank, from how many micro-batches on), for D ranks
FORMS = {
    "gpipe": (lambda d: 3 * (d - 1), lambda d: 3 * (d - 1), lambda d: 1),
    "one_f_one_b": (lambda d: 3 * (d - 1), lambda d: 3 * (d - 1), lambda d: 1),
    "interleaved": (lambda d: 1.5 * (d - 1), lambda d: 1.5 * (d - 1), lambda d: d),
    "zero_bubble_h1": (lambda d: d - 1, lambda d: d - 1, lambda d: d),
    "zero_bubble_h2": (lambda d: d - 1, lambda d: 0, lambda d: 2 * d - 1),
    "zero_bubble_v": (lambda d: (d - 1) / 2, lambda d: 0, lambda d: d),
    "dualpipe": (lambda d: d - 2, lambda d: d - 2, lambda d: 2 * d),
    "dualpipe_v": (lambda d: d - 1, lambda d: d - 1, lambda d: 2 * d),
}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", FORMS)
def test_bubbles_equal_the_closed_forms(name: str, ranks: int) -> None:
    schedule, (flush, span, least) = SCHEDULES[name], FORMS[name]
    seen = 0
    for m in grid(ranks):
        if not schedule.legal(ranks, m) or m < least(ranks):
            continue
        seen += 1
        _, times = run(schedule, ranks, m)
        idle = [times.span_bubble(r) * (times.ends[r][-1] - times.starts[r][0]) for r in range(ranks)]
        assert times.makespan - 3 * m == pytest.approx(flush(ranks))
        if name != "zero_bubble_v" or m >= 2 * ranks - 1:  # with fewer the gaps are within the spans
            assert max(idle) == pytest.approx(span(ranks), abs=1e-9)
        assert times.flush_bubble == pytest.approx(flush(ranks) / (3 * m + flush(ranks)))
        assert schedule.bubble(ranks, UNIT, schedule.chunks) == pytest.approx(flush(ranks))
    assert seen >= 3


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_peak_activations_equal_the_closed_forms(name: str, ranks: int) -> None:
    schedule = SCHEDULES[name]
    for m in (m for m in grid(ranks) if schedule.legal(ranks, m)):
        found = peak_frames(schedule.order(ranks, m))
        forms = [schedule.frames(ranks, m, r, schedule.chunks) for r in range(ranks)]
        assert all(peak <= form for peak, form in zip(found, forms, strict=True)), m
        if m >= 2 * ranks - 1 and not name.startswith("v_"):
            assert list(found) == forms, m


@pytest.mark.parametrize("ranks", RANKS)
def test_activation_formulas_are_the_published_ones(ranks: int) -> None:
    m = 4 * ranks
    peaks = {name: max(peak_frames(row.order(ranks, m))) for name, row in SCHEDULES.items()}
    assert peaks["gpipe"] == m and peaks["one_f_one_b"] == ranks == peaks["zero_bubble_h1"] == peaks["zero_bubble_v"]
    assert peaks["interleaved"] == ranks * (1 + (ranks - 1) / (2 * ranks))
    assert peaks["zero_bubble_h2"] == 2 * ranks - 1
    assert peaks["dualpipe"] == ranks + 1 and peaks["dualpipe_v"] == ranks + 0.5
    assert peaks["v_half"] <= ceil(ranks + 2) / 2 and peaks["v_min"] <= ceil(2 * (ranks + 4) / 3) / 2


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("name", "share"), [("v_half", 1 / 2), ("v_min", 2 / 3)])
def test_schedules_of_bounded_memory_have_their_share_of_the_bubble(name: str, share: float, ranks: int) -> None:
    """V-Half half of 1F1B's, V-Min at most two thirds."""
    for m in (m for m in grid(ranks) if ranks <= m <= 3 * ranks):
        _, times = run(SCHEDULES[name], ranks, m)
        assert times.makespan - 3 * m <= share * 3 * (ranks - 1), m


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_interleaving_divides_the_bubble_for_any_number_of_micro_batches(ranks: int, chunks: int) -> None:
    for m in range(ranks, 3 * ranks + 2):
        order, times = run(SCHEDULES["interleaved"], ranks, m, chunks)
        assert times.makespan - 3 * m == pytest.approx(3 * (ranks - 1) / chunks)
        forms = [SCHEDULES["interleaved"].frames(ranks, m, r, chunks) for r in range(ranks)]
        assert list(peak_frames(order)) == pytest.approx(forms)


def test_shares_of_a_small_step() -> None:
    """Four ranks, eight micro-batches: flush bubbles as published, in percent."""
    wanted = {"one_f_one_b": 27.3, "interleaved": 15.8, "zero_bubble_h1": 11.1, "dualpipe": 7.7, "zero_bubble_v": 5.9}
    for name, percent in wanted.items():
        assert round(100 * run(SCHEDULES[name], 4, 8)[1].flush_bubble, 1) == percent


@pytest.mark.parametrize("ranks", [2, 4, 6, 8, 10, 12, 14, 16])
def test_merged_share_of_dualpipe(ranks: int) -> None:
    for m in range(2 * ranks, 6 * ranks + 1, 2):
        order = SCHEDULES["dualpipe"].order(ranks, m)
        for rank, items in enumerate(order.ranks):
            half = min(rank, ranks - 1 - rank)
            middle = rank in (ranks // 2 - 1, ranks // 2)
            assert sum(isinstance(item, Pair) for item in items) == m - 3 * ranks // 2 + half + 1 - middle


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_order_does_everything_once_and_can_run(name: str) -> None:
    schedule = SCHEDULES[name]
    for ranks in (1, 2, 3, 4, 6, 7):
        for m in (m for m in (1, 2, 3, 5, 8, 12, 14, 17) if schedule.legal(ranks, m)):
            order = schedule.order(ranks, m)
            timetable(order, Durations.unit(len(order.placement)))  # raises when it stalls
            done = Counter(e for r in range(ranks) for e in order.elements(r))
            per_copy = len(order.placement) // order.copies
            assert set(done.values()) == {1} and len(order.placement) == schedule.copies * per_copy
            assert order.placement == schedule.place(ranks, schedule.chunks)
            for phases in ("F", "BI", "BW"):
                assert sum(e.phase in phases for e in done) == per_copy * m
            for rank in range(ranks):
                assert all(order.placement[e.chunk] == rank for e in order.elements(rank))


def test_legal_counts_are_the_nearest_on_both_sides() -> None:
    dualpipe = SCHEDULES["dualpipe"]
    assert legal_counts(dualpipe, 8, 17) == (16, 18) and legal_counts(dualpipe, 8, 14) == (16,)
    assert legal_counts(dualpipe, 7, 14) == () and legal_counts(SCHEDULES["zero_bubble_h2"], 4, 3) == (7,)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in ("solved", "gpipe")])
def test_steps_of_unequal_phases_follow_the_closed_forms(name: str) -> None:
    """Against timetables, with an input gradient up to three times as long as a forward."""
    row, random = SCHEDULES[name], Random(name)
    for _ in range(12):
        ranks, times = random.choice((4, 8)), Times(random.uniform(0.7, 1.4), random.uniform(0.6, 2.2), 1.0)
        place, m = row.place(ranks, row.chunks), 4 * ranks
        share = ranks * row.copies / len(place)
        phases = (times.forward, times.backward_input, times.backward_weight)
        durations = Durations(*((share * phase,) * len(place) for phase in phases), 0.0)
        found = timetable(row.order(ranks, m), durations).makespan
        form = m * row.steady(times) + row.bubble(ranks, times, row.chunks)
        assert form == pytest.approx(found, rel=EXACT.get(name, 0.025)), (ranks, times)
