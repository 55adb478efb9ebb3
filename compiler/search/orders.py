"""Schedules for the best candidates: every order that the wishes allow is timed with the candidate's own chunk times.

The closed forms rank meshes by one schedule; here the best of them get the others too, with the layers split for the
schedule's placement. A timed order knows uneven chunks, head and links; what stands outside the body of a step keeps
its closed form.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from titan.compiler.cost.estimate import Estimator
from titan.compiler.schedules.listing import Costs
from titan.compiler.schedules.order import Order
from titan.compiler.schedules.registry import schedule_row
from titan.compiler.schedules.solved import solve
from titan.compiler.schedules.timetable import period, timetable
from titan.compiler.search.candidates import Candidate, saved, with_stages
from titan.compiler.search.space import schedules
from titan.compiler.strategy import Strategy

if TYPE_CHECKING:
    from titan.compiler.spec.schema import Spec

BEST = 4  # meshes whose schedules are tried
SHARED = 12  # the same where ranks share cores, of which closed forms know little
ELEMENTS = 6500  # of an order that is timed; a longer one keeps its closed form
ABOUT = 1.08  # by which the closed form of a split backward's memory may be too high: plans are measured afterwards
SOLVED = 1_600  # elements of an order that is searched for
STALL = 0.02  # share of a step that not waiting for the norm must save: a norm that clips by surprise costs two steps


def with_schedules(spec: Spec, estimator: Estimator, ranked: list[Candidate], limit: int) -> list[Candidate]:
    """`ranked` with the other schedules of its first candidates, in order of their times."""
    tried: list[Candidate] = []
    best = SHARED if estimator.machine.cores else BEST
    for candidate in ranked[:best]:
        s = candidate.strategy
        for name, chunks in schedules(spec, s.pipeline, s.micro_batches) if s.pipeline > 1 else ():
            elements = 3 * s.pipeline * s.micro_batches * chunks * schedule_row(name).copies
            first = candidate is ranked[0] or _pinned(spec, name)
            if elements > ELEMENTS or (name == "solved" and (elements > SOLVED or not first)):
                continue
            tried += timed(spec, estimator, candidate, name, chunks, limit)
    if not tried:
        return ranked
    others = [c for c in ranked[:best] if c.strategy.pipeline == 1]
    return sorted([*tried, *others], key=lambda c: c.key) + ranked[best:]


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
    once = timetable(strategy.order, durations)
    bodies = {False: once.makespan} if wish.allows(False) else {}
    if wish.allows(True) and not strategy.state_on_host:  # legality: what is kept is on the device
        on = period(strategy.order, durations, once)
        bodies |= {True: on} if not bodies or on < (1 - STALL) * once.makespan else {}
    tried = []
    for late, body in bodies.items():
        whole = replace(strategy, late_check=late)
        estimate = estimator.estimate(whole)
        if estimate.memory <= about:
            seconds = estimate.seconds - estimator.pipeline_part(whole) + estimator.crowded(whole, body)
            tried.append(Candidate(whole, replace(estimate, seconds=seconds)))
    return tried


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
