"""Schedules for the best pipelines: ranked by closed form, and the first of them timed by their orders, with the chunk
times of their own layers. Of long orders two shorter ones are timed.

A timed order knows uneven chunks, head and links, with the layers split for the schedule's placement; what stands
outside the body of a step keeps its closed form.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from titan.compiler.cost.estimate import Estimator
from titan.compiler.schedules.listing import Costs
from titan.compiler.schedules.order import Order
from titan.compiler.schedules.registry import schedule_row
from titan.compiler.schedules.solved import solve
from titan.compiler.schedules.timetable import Durations, timetable
from titan.compiler.search.candidates import Candidate, saved, with_stages
from titan.compiler.search.hopes import Hopes, room, scheduled
from titan.compiler.search.ladder import Ladders
from titan.compiler.search.space import schedules
from titan.compiler.shared_work import SharedWork
from titan.compiler.strategy import Strategy

if TYPE_CHECKING:
    from titan.compiler.spec.schema import Spec

LISTED = 4  # pairs of pipeline and schedule after which only what may be faster than these gets a closed form
CROWDED = 80  # the same where ranks share cores
TIMED = 8  # pairs, the first by closed form, that are timed by their orders
ELEMENTS = 6500  # of an order that is timed; of a longer one two shorter ones are
MOST = 65_000  # elements of all orders that are timed, beyond the first two
PAYS = 12_000  # elements of all orders from which on a second process pays
SOLVED = 1_600  # elements of an order that is searched for
ALIKE = 0.01  # share of a step by which closed forms may be wrong about two layouts with the same order
STALL = 0.02  # share of a step that not waiting for the norm must save: a norm that clips by surprise costs two steps


def with_schedules(
    spec: Spec, estimator: Estimator, ranked: list[Candidate], limit: int, margin: float
) -> list[Candidate]:
    """`ranked`, and pipelines with other schedules, in order of their times: by closed form, which is wrong by about
    `margin`, and by their orders where those may be the best."""
    crowded = bool(estimator.machine.cores)  # closed forms know little of ranks that share cores
    most, apart, alike = (CROWDED, inf, inf) if crowded else (LISTED, margin, ALIKE)
    pairs = _pairs(spec, estimator, ranked, limit, most, apart)
    chosen = pairs if crowded else _likely(pairs, margin)
    jobs: dict[str, list[Pair]] = {}
    for pair in chosen:
        s = pair.candidate.strategy
        jobs.setdefault(f"{s.schedule} {s.chunks} {s.pipeline} {s.micro_batches}", []).append(pair)
    work = {name: partial(_all_timed, spec, estimator, listed, limit, alike) for name, listed in jobs.items()}
    pays = len(work) > 1 and sum(_timed_elements(p.candidate.strategy) for p in chosen) > PAYS
    found = [c for some in SharedWork(work, pays=pays).finish().values() for c in some]
    known = {p.number for p in chosen if p.stands}
    rest = (p.candidate for p in pairs if p not in chosen and not p.stands)
    return sorted((*found, *rest, *(c for n, c in enumerate(ranked) if n not in known)), key=lambda c: c.key)


class Pair(NamedTuple):
    """A candidate with a schedule and its closed form: of the `number`-th mesh, whose own schedule it may be."""

    seconds: float
    number: int
    candidate: Candidate
    stands: bool


def _pairs(
    spec: Spec, estimator: Estimator, ranked: list[Candidate], limit: int, most: int, margin: float
) -> list[Pair]:
    """Pipelines with schedules that fit, until so many are faster than there is hope for the others, or what has no
    stages is. Of one pipeline none whose bound is above another's time by the margin."""
    hopes, ladders = Hopes(spec, estimator, limit), Ladders(spec)
    found: list[Pair] = []
    least = (1 + 2 * margin) * min((c.estimate.seconds for c in ranked if c.strategy.pipeline == 1), default=inf)
    hoped = sorted((hopes.seconds(c.strategy, c.estimate), n) for n, c in enumerate(ranked) if c.strategy.pipeline > 1)
    for place, (seconds, n) in enumerate(hoped):
        enough = min(found[most - 1].seconds, least) if len(found) >= most else least
        if seconds >= enough:
            break
        s = ranked[n].strategy
        for fitted in _fitting(ladders, estimator, _scheduled(spec, s, place == 0), limit, enough, margin):
            pair = Pair(fitted.estimate.seconds, n, fitted, fitted.strategy.schedule == s.schedule)
            insort(found, pair, key=lambda p: p[:2])
    return found


def _scheduled(spec: Spec, s: Strategy, first: bool) -> Iterator[Strategy]:
    """A pipeline with every schedule; an order is searched for where that is short, for the first or when asked."""
    for name, chunks in schedules(spec, s.pipeline, s.micro_batches):
        changed = scheduled(spec, s, name, chunks)
        short = _elements(changed, s.micro_batches) <= SOLVED
        if name != "solved" or (short and (first or _pinned(spec, name))):
            # what keeps less may need no recompute where another schedule did
            yield changed.but(recompute="none") if spec.parallel.recompute.allows("none") else changed


def _fitting(
    ladders: Ladders, estimator: Estimator, ways: Iterator[Strategy], limit: int, enough: float, margin: float
) -> Iterator[Candidate]:
    """Those of one pipeline that fit, with what they must save for it."""
    for bound, _, s in sorted((estimator.bound(s, s.recompute), n, s) for n, s in enumerate(ways)):
        if bound >= enough:
            return
        most = room(limit, s.schedule)
        found = saved(ladders, estimator, Candidate(s, estimator.estimate(s)), most, enough)
        if found.estimate.memory <= most:
            enough = min(enough, (1 + margin) * found.estimate.seconds)
            yield found


def _likely(pairs: list[Pair], margin: float) -> list[Pair]:
    """Those that may be the best when every two are wrong by `margin`; few where their orders are long."""
    found: list[Pair] = []
    elements = 0
    for pair in pairs[:TIMED]:
        elements += _timed_elements(pair.candidate.strategy)
        if pair.seconds > (1 + 2 * margin) * pairs[0].seconds or (len(found) > 1 and elements > MOST):
            break
        found.append(pair)
    return found


def _elements(s: Strategy, micro_batches: int) -> int:
    """Of an order of a strategy with so many micro-batches, backwards split."""
    return 3 * micro_batches * s.pipeline * s.chunks * schedule_row(s.schedule).copies


def _timed_elements(s: Strategy) -> int:
    """Of the orders that are timed for a strategy."""
    return _elements(s, sum({*rounds(s)}))


def _pinned(spec: Spec, name: str) -> bool:
    wish = spec.parallel.schedule
    return wish.fixed and wish.value == name


def _all_timed(spec: Spec, estimator: Estimator, pairs: list[Pair], limit: int, alike: float) -> list[Candidate]:
    """Pairs with the same order, the fastest by closed form first: those that are not nearly as fast take so many times
    as long as their closed forms say as it does."""
    found: list[Candidate] = []
    first, times = inf, 1.0
    for pair in pairs:
        if pair.seconds > (1 + alike) * first:
            estimate = replace(pair.candidate.estimate, seconds=times * pair.seconds)
            found.append(Candidate(pair.candidate.strategy, estimate))
        elif tried := timed(spec, estimator, pair.candidate, limit):
            fastest = min(c.estimate.seconds for c in tried)
            first, times = (first, times) if found else (pair.seconds, fastest / pair.seconds)
            found += tried
    return found


def timed(spec: Spec, estimator: Estimator, candidate: Candidate, limit: int) -> list[Candidate]:
    """A pipeline timed by its order, as far as it fits: waiting for the norm, and not waiting for it where that is
    faster."""
    about = room(limit, candidate.strategy.schedule)
    strategy = finished(candidate, estimator, limit)
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
    return once.makespan, once.period()


def rounds(s: Strategy) -> tuple[int, int]:
    """Numbers of micro-batches whose orders are timed; twice the strategy's own where that is short."""
    row, own = schedule_row(s.schedule), s.micro_batches
    if _elements(s, own) > ELEMENTS and s.written_order is None and row.size is None:
        for few in range(2 * s.pipeline + own % s.pipeline, own - s.pipeline, s.pipeline):  # the pipeline has filled
            more = few + s.pipeline
            if few + more >= own:
                break
            if row.legal(s.pipeline, few) and row.legal(s.pipeline, more):
                return few, more
    return own, own


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
