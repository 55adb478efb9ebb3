"""Schedules for the best candidates: the orders that the wishes allow are timed with the candidate's own chunk times.
Of long ones, of which only the first candidates get some, two shorter ones are.

The closed forms rank meshes by one schedule; here the best of them get the others too, with the layers split for the
schedule's placement. A timed order knows uneven chunks, head and links; what stands outside the body of a step keeps
its closed form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from titan.compiler.cost.estimate import Estimator
from titan.compiler.schedules.listing import Costs
from titan.compiler.schedules.order import Order
from titan.compiler.schedules.registry import schedule_row
from titan.compiler.schedules.solved import solve
from titan.compiler.schedules.timetable import Durations, period, timetable
from titan.compiler.search.candidates import Candidate, saved, with_stages
from titan.compiler.search.space import schedules
from titan.compiler.shared_work import SharedWork
from titan.compiler.strategy import Strategy

if TYPE_CHECKING:
    from titan.compiler.spec.schema import Spec

BEST = 4  # meshes whose schedules are tried
SHARED = 12  # the same where ranks share cores, of which closed forms know little
ELEMENTS = 6500  # of an order that is timed; of a longer one two shorter ones are
LONG = 3  # longer orders that are timed for one of the first meshes: the best by closed form that fit
LONG_MESHES = 2
ABOUT = 1.08  # by which the closed form of a split backward's memory may be too high: plans are measured afterwards
PAYS = 2_000  # forwards of all orders from which on a second process pays
SOLVED = 1_600  # elements of an order that is searched for
STALL = 0.02  # share of a step that not waiting for the norm must save: a norm that clips by surprise costs two steps

Listed = tuple[Candidate, list[tuple[str, int]]]  # a candidate with schedules and their chunks


def with_schedules(spec: Spec, estimator: Estimator, ranked: list[Candidate], limit: int) -> list[Candidate]:
    """`ranked` with the other schedules of its first candidates, in order of their times."""
    first = ranked[: SHARED if estimator.machine.cores else BEST]
    jobs = _jobs(spec, estimator, first, limit)
    pays = sum(c.strategy.pipeline * c.strategy.micro_batches for c in first) > PAYS
    tried = [c for found in SharedWork(jobs, pays=pays).finish().values() for c in found]
    if not tried:
        return ranked
    others = [c for c in first if c.strategy.pipeline == 1]
    return sorted([*tried, *others], key=lambda c: c.key) + ranked[len(first) :]


def _jobs(
    spec: Spec, estimator: Estimator, first: list[Candidate], limit: int
) -> dict[str, Callable[[], list[Candidate]]]:
    """What is timed apart: long orders of meshes that have the same, and each shorter one."""
    together: dict[tuple[int, int], list[Listed]] = {}
    jobs: dict[str, Callable[[], list[Candidate]]] = {}
    for number, candidate in enumerate(first):
        short, long = _by_length(spec, estimator, candidate, number)
        if long and number < LONG_MESHES:
            shape = candidate.strategy.pipeline, candidate.strategy.micro_batches
            together.setdefault(shape, []).append((candidate, long))
        for name, chunks in short:
            jobs[f"{number} {name} {chunks}"] = partial(timed, spec, estimator, candidate, name, chunks, limit)
    return {str(shape): partial(_long, spec, estimator, listed, limit) for shape, listed in together.items()} | jobs


def _long(spec: Spec, estimator: Estimator, listed: list[Listed], limit: int) -> list[Candidate]:
    """Of each candidate the first of its long orders that fit."""
    tried: list[Candidate] = []
    for candidate, long in listed:
        left = LONG
        for name, chunks in long:
            found = timed(spec, estimator, candidate, name, chunks, limit)
            tried, left = tried + found, left - bool(found)
            if not left:
                break
    return tried


def _by_length(
    spec: Spec, estimator: Estimator, candidate: Candidate, number: int
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """The schedules of one candidate, the `number`-th: those with short orders, and those with long ones, the best by
    closed form first."""
    s = candidate.strategy
    short: list[tuple[str, int]] = []
    long: list[tuple[float, str, int]] = []
    for name, chunks in schedules(spec, s.pipeline, s.micro_batches) if s.pipeline > 1 else ():
        elements = 3 * s.pipeline * s.micro_batches * chunks * schedule_row(name).copies
        first = number == 0 or _pinned(spec, name)
        if name == "solved" and (elements > SOLVED or not first):
            continue
        if elements <= ELEMENTS:
            short.append((name, chunks))
        elif schedule_row(name).size is None:
            changed = replace(s, schedule=name, wished_chunks=chunks, stages=spec.parallel.stages.value or ())
            long.append((estimator.bound(changed), name, chunks))
    return short, [(name, chunks) for _, name, chunks in sorted(long)]


def _pinned(spec: Spec, name: str) -> bool:
    wish = spec.parallel.schedule
    return wish.fixed and wish.value == name


def timed(
    spec: Spec, estimator: Estimator, candidate: Candidate, name: str, chunks: int, limit: int
) -> list[Candidate]:
    """The candidate with another schedule, timed, as far as it fits: waiting for the norm, and not waiting for it where
    that is faster."""
    changed = replace(candidate.strategy, schedule=name, wished_chunks=chunks, stages=spec.parallel.stages.value or ())
    changed = replace(changed, recompute=_first_tier(spec, candidate.strategy))
    if schedule_row(name).copies > 1 and changed.zero == 0 and spec.parallel.zero.allows(1):
        changed = replace(changed, zero=1)  # mirrored stages share their state, even on one data rank
    about = limit * (ABOUT if schedule_row(name).splits else 1.0)
    found = saved(spec, estimator, Candidate(changed, estimator.estimate(changed)), round(about))
    if found.estimate.memory > about:
        return []
    strategy = finished(found, estimator, limit)
    durations, wish = estimator.durations(strategy), spec.parallel.late_check
    once, on = body_seconds(strategy, durations)
    bodies = {False: once} if wish.allows(False) else {}
    if wish.allows(True) and not strategy.state_on_host:  # legality: what is kept is on the device
        bodies |= {True: on} if not bodies or on < (1 - STALL) * once else {}
    tried = []
    for late, body in bodies.items():
        whole = replace(strategy, late_check=late)
        estimate = estimator.estimate(whole)
        if estimate.memory <= about:
            seconds = estimate.seconds - estimator.pipeline_part(whole) + estimator.crowded(whole, body)
            tried.append(Candidate(whole, replace(estimate, seconds=seconds)))
    return tried


def body_seconds(strategy: Strategy, durations: Durations) -> tuple[float, float]:
    """Seconds of the body of a step: of one alone, and what a further one adds. In the middle of a long order every
    round of micro-batches takes as long as the one before, so two shorter orders that differ by a round tell."""
    few, more = rounds(strategy)
    if few == more:
        return _timed_body(strategy, durations)
    (a, b), (c, d) = (_timed_body(replace(strategy, micro_batches=number), durations) for number in (few, more))
    rest = (strategy.micro_batches - more) / (more - few)
    return c + rest * (c - a), d + rest * (d - b)


def _timed_body(strategy: Strategy, durations: Durations) -> tuple[float, float]:
    once = timetable(strategy.order, durations)
    return once.makespan, period(strategy.order, durations, once)


def rounds(s: Strategy) -> tuple[int, int]:
    """Numbers of micro-batches whose orders are timed; twice the strategy's own where that is short."""
    row, own = schedule_row(s.schedule), s.micro_batches
    elements = 3 * s.pipeline * own * s.chunks * row.copies
    if elements > ELEMENTS and s.written_order is None and row.size is None:
        for few in range(2 * s.pipeline + own % s.pipeline, own - s.pipeline, s.pipeline):  # the pipeline has filled
            if row.legal(s.pipeline, few) and row.legal(s.pipeline, few + s.pipeline):
                return few, few + s.pipeline
    return own, own


def _first_tier(spec: Spec, s: Strategy) -> str:
    """A schedule that keeps less may need no recompute where another did."""
    return "none" if spec.parallel.recompute.allows("none") else s.recompute


def finished(candidate: Candidate, estimator: Estimator, limit: int) -> Strategy:
    """The strategy with its layers split, and with its order when that has to be found."""
    strategy = with_stages(candidate, estimator, limit)
    if strategy.schedule != "solved" or strategy.written_order is not None:
        return strategy
    return replace(strategy, written_order=solved_order(strategy, estimator, limit))


def solved_order(s: Strategy, estimator: Estimator, limit: int) -> Order | None:
    """The best order for the strategy's chunks within the memory of every rank; None where a rank has room for less
    than one micro-batch, or where the order would be too long to search for."""
    layer = estimator.layer(estimator.cut(s))
    frames = tuple(float(max(n, 1) * layer.stored(s.recompute)) for n in s.stages)
    costs = Costs(estimator.durations(s), frames, estimator.room(s, limit))
    if 3 * s.micro_batches * len(s.stages) > ELEMENTS:
        return None
    try:
        return solve(s.pipeline, s.micro_batches, costs, effort=0)
    except ValueError:
        return None
