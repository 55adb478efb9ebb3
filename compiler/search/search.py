"""Spec -> the best plan: enumerate, price in closed form, compile and simulate the finalists, keep the fastest.

Deterministic: how many finalists are compiled follows from the size of their plans, never from the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from titan.compiler.cost.estimate import Estimator
from titan.compiler.cost.machine import Machine, read_machine
from titan.compiler.cost.memory import MemoryLedger
from titan.compiler.cost.shape import read_shape
from titan.compiler.cost.timeline import Timeline
from titan.compiler.plan.frozen import dataclass
from titan.compiler.search.bound import least_step
from titan.compiler.search.candidates import LARGE, Candidate, affordable, price, with_stages
from titan.compiler.search.distance import Finalist
from titan.compiler.search.enumeration import enumerate_space
from titan.compiler.search.finals import FINALISTS, WORK, Finals
from titan.compiler.search.improve import further_ahead, layer_by_layer, on_host
from titan.compiler.search.ladder import NEAR
from titan.compiler.search.logits import with_kept_logits
from titan.compiler.search.measured import ignored
from titan.compiler.search.orders import with_schedules
from titan.compiler.search.reasons import as_simulated
from titan.compiler.search.refuse import nothing_fits, nothing_legal
from titan.compiler.search.space import Space, allowed
from titan.compiler.shared_work import SharedWork
from titan.compiler.spec.wishes import Wish
from titan.compiler.strategy import Strategy
from titan.grammar.diagnostics import TitanError

if TYPE_CHECKING:
    from titan.compiler.plan.program import Plan
    from titan.compiler.spec.schema import Spec

MANY = 1_000_000  # legal strategies from which on a second process pays for their bound
WRITTEN = 50_000  # instructions up to which a plan is small
SECOND = 4_000  # strategies up to which pricing the other kind too costs little
MARGIN = 0.03  # about the error of the closed forms
LITTLE = 4  # times as many block calls as a plan has, beside which it costs little
FULL = 0.9  # of the memory limit, and times the bound that a step takes, from which on host memory may make it faster
LOST = 1.12
MUCH = 0.25  # of what a plan holds, that optimizer state is to be moved first
MESH = ("pipeline", "data", "context", "tensor")


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """A plan that was compiled and simulated and lost: step seconds, peak bytes, verdict."""

    strategy: Strategy
    seconds: float
    memory: int
    verdict: str


@dataclass(frozen=True)
class SearchResult:
    """What was chosen, against what. `candidates` counts the legal strategies, `priced` those that needed a price,
    `compiled` the finalists; `bound` is a step (seconds) that no legal strategy gets below; `seconds` is the time of
    the search; `notes` say where and why it stopped early."""

    strategy: Strategy
    plan: Plan
    timeline: Timeline
    ledger: MemoryLedger
    runners_up: tuple[RunnerUp, ...]
    candidates: int
    priced: int
    fitting: int
    compiled: int
    bound: float
    seconds: float
    notes: tuple[str, ...]


def memory_limit(spec: Spec) -> int:
    """Bytes of a device that a plan may use."""
    return int(spec.cluster.device.memory * spec.objective.memory_fraction)


def safe_limit(machine: Machine, limit: int) -> int:
    """The point prediction whose upper bound is the limit: allocator's loss at its worst, the same context."""
    slack, upper = (1 + machine.figures[name] for name in ("allocator_slack", "allocator_slack_upper"))
    return round(max(limit - machine.reserved, 0) * slack / upper) + machine.reserved


def estimator_of(spec: Spec, machine: Machine | None = None) -> Estimator:
    from titan.compiler.graph.build import COMPUTE_DTYPE

    machine = machine or read_machine(spec.cluster.model_dump())
    product = "f8" if spec.train.precision == "fp8" else ""
    shape = read_shape(spec.model.model_dump(), spec.train.sequence, COMPUTE_DTYPE[spec.train.precision], product)
    found = Estimator(machine, shape, spec.train.global_batch)
    if machine.curves:
        from titan.compiler.search.calibrate import longer_than_closed

        found.longer = longer_than_closed(spec, found)
    return found


def fitting_by_estimate(spec: Spec) -> list[Candidate]:
    """What fits by the closed forms, fastest first; nothing where no layout is legal."""
    estimator, space = estimator_of(spec), enumerate_space(spec)
    return price(spec, estimator, space, safe_limit(estimator.machine, memory_limit(spec))).fitting


def search(spec: Spec, risk: bool = True, likely: Callable[[Plan], None] = ignored) -> SearchResult:
    """The fastest plan that fits; else the fastest that fits with something in host memory; else, where `risk` is
    allowed, the fastest that is at risk, without the host before with it. `likely` is told of a large plan as soon as
    it will probably be the one, and of the one when it is known: then its proofs can begin.

    Raises TitanError T302 when no layout is legal (exit code 2), T301 when none fits (exit code 3).
    """
    try:
        found = _search(spec, risk, likely)
    except TitanError as refused:
        hosted = _with_host(spec, risk) if refused.exit_code == 3 else None
        if hosted is None:
            raise
        return hosted
    if found.ledger.verdict != "fits":
        hosted = _with_host(spec, False)
        return replace(hosted, bound=min(hosted.bound, found.bound)) if hosted else found
    return _faster_with_host(spec, found)


def _faster_with_host(spec: Spec, found: SearchResult) -> SearchResult:
    """A plan that fits, or, where memory that is full may be what it loses time to, a faster one with optimizer state
    or activations in host memory. Not where the search is long, or is one of many in ever less memory."""
    full = found.ledger.upper > FULL * found.ledger.limit and found.timeline.seconds > LOST * found.bound
    if not full or found.candidates > MANY or spec.objective.goal == "memory":
        return found
    held = dict(found.ledger.worst.components)
    # state goes there and back once a step, activations with every micro-batch
    word = "optimizer" if held["optimizer"] > MUCH * found.ledger.peak else "activations"
    if word not in allowed(spec, "offload") or (found.strategy.offload == word and not found.strategy.offloaded):
        return found
    hosted = _with_host(spec, False, (word,))
    if hosted is None or hosted.timeline.step >= found.timeline.step:
        return found
    why = f"the best that was found without it takes {found.timeline.seconds / hosted.timeline.seconds - 1:.1%} more"
    return _explained(spec, replace(hosted, bound=min(hosted.bound, found.bound)), why)


def _with_host(spec: Spec, risk: bool, words: tuple[str, ...] = ()) -> SearchResult | None:
    """The fastest with one of some words, or of all that are allowed; `both` first: where not even that fits, nothing
    less does."""
    best: SearchResult | None = None
    for word in words or allowed(spec, "offload")[:0:-1]:
        pinned = replace(spec, parallel=replace(spec.parallel, offload=Wish("=", (word,))))
        try:
            found = _search(pinned, risk)
        except TitanError:
            if best is None:
                return None
            continue
        best = found if best is None or found.timeline.step < best.timeline.step else best
    if best is None:
        return None
    return _explained(spec, best, "without it nothing fits")


def _explained(spec: Spec, found: SearchResult, why: str) -> SearchResult:
    """With a reason to keep something in host memory."""
    from titan.compiler.lower import with_settings

    reasons = tuple((k, "search", why) if k == "offload" else (k, o, text) for k, o, text in found.strategy.reasons)
    strategy = replace(found.strategy, reasons=reasons)
    return replace(found, strategy=strategy, plan=with_settings(spec, found.plan, strategy))


def _search(spec: Spec, risk: bool, likely: Callable[[Plan], None] = ignored) -> SearchResult:
    started = time.perf_counter()
    estimator, limit = estimator_of(spec), memory_limit(spec)
    space = enumerate_space(spec)
    if not space.families:
        raise nothing_legal(spec, space)
    bound = {"bound": partial(least_step, spec, estimator, space, limit)}
    with SharedWork(bound, pays=space.size > MANY, later=True) as aside:
        found = _best(spec, estimator, space, risk, likely, aside.begin)
        return replace(found, bound=aside.finish()["bound"], seconds=time.perf_counter() - started)


def _best(
    spec: Spec,
    estimator: Estimator,
    space: Space,
    risk: bool,
    likely: Callable[[Plan], None],
    aside: Callable[[], None],
) -> SearchResult:
    """What the search finds, without its bound and its time. `aside` begins what another process may do meanwhile: when
    it has nothing to do for the search."""
    from titan.compiler.lower import with_settings

    limit = memory_limit(spec)
    ways = ((safe_limit(estimator.machine, limit), ("fits",)), (limit, ("fits", "at risk")))
    for closed, verdicts in ways if risk else ways[:1]:
        priced = price(spec, estimator, space, closed)
        fitting, others = priced.fitting, priced.others
        near = sorted((c for c in others if c.estimate.memory <= NEAR * closed), key=lambda c: c.key)
        ranked, lost = affordable(fitting, LARGE, MARGIN)
        ranked = with_kept_logits(spec, estimator, ranked, closed, MARGIN)
        ranked = with_schedules(spec, estimator, ranked, closed, MARGIN)
        aside()
        if estimator.machine.cores:
            ranked = list(dict.fromkeys((*_one_each(ranked, *MESH, "micro_batch"), *ranked)))
        ranked += near
        finals = Finals(spec, estimator, limit, closed, verdicts, (*ranked, *fitting, *others))
        finalists = finals.compile(ranked, likely)
        if finalists:
            finalists += finals.compile(_cheaper(ranked, finalists))
            finalists += finals.compile(_unlike(ranked, finalists))
            finalists += finals.compile(_rivals(spec, estimator, priced.number, finalists, closed))
            break
    else:
        closest = min((*fitting, *others), key=lambda c: (c.estimate.memory, c.key))
        raise nothing_fits(spec, with_stages(closest, estimator, limit), space.size)
    best = min(finalists, key=lambda f: f.timeline.step)  # of equal ones the first: `ranked` is in a fixed order
    best = finals.refined(space, best)
    best = layer_by_layer(spec, best, estimator.machine, limit)
    best = on_host(spec, best, estimator.machine, limit)
    best = further_ahead(spec, best, estimator, limit)
    likely(best.plan)
    simulated = [(f.strategy, f.timeline.seconds) for f in finalists]
    strategy = replace(best.strategy, reasons=as_simulated(best.strategy, best.timeline.seconds, simulated))
    return SearchResult(
        strategy,
        with_settings(spec, best.plan, strategy),
        best.timeline,
        best.ledger,
        tuple(_runner_up(f) for f in sorted(finalists, key=lambda f: f.timeline.step) if f.plan is not best.plan),
        space.size,
        priced.number,
        len(fitting),
        len(finalists),
        0.0,
        0.0,
        _notes(space, len(fitting), len(finalists), lost),
    )


def _cheaper(ranked: list[Candidate], finalists: list[Finalist]) -> list[Candidate]:
    """Beside a large plan that stands alone the first that costs little to compile and may be as fast."""
    first, (alone, *others) = ranked[0], finalists
    if others or any(getattr(alone.strategy, name) != getattr(first.strategy, name) for name in (*MESH, "schedule")):
        return []  # a small one may stand already
    enough = (1 + MARGIN) * first.estimate.seconds
    near = (c for c in ranked if c.work * LITTLE <= first.work and c.estimate.seconds < enough)
    return [*islice(near, 1)]


def _unlike(ranked: list[Candidate], finalists: list[Finalist]) -> list[Candidate]:
    """Small plans of kinds that were not simulated, whose estimates are below the best simulated step: of other kinds
    closed forms err in other ways."""
    best, known = min(f.timeline.seconds for f in finalists), {_kind(f.strategy) for f in finalists}
    found: dict[tuple[object, ...], Candidate] = {}
    for c in ranked:
        if c.estimate.seconds < best and _small(c) and _kind(c.strategy) not in known:
            found.setdefault(_kind(c.strategy), c)
    return list(found.values())


def _kind(s: Strategy) -> tuple[object, ...]:
    """Choices about which closed forms err alike."""
    form = s.context_form if s.context > 1 else ""
    return s.pipeline > 1, form, s.tensor > 1, s.loss_rows > 0, s.gather if s.zero == 3 else s.zero


def _rivals(spec: Spec, estimator: Estimator, priced: int, finalists: list[Finalist], closed: int) -> list[Candidate]:
    """Pipelines where none was simulated, or none where all were: the closed forms err about both in other ways, so the
    best of the other kind may win when it is priced apart. Only where that costs little."""
    piped = {f.strategy.pipeline > 1 for f in finalists}
    if priced > SECOND or len(piped) > 1 or spec.parallel.pipeline.relation != "auto" or spec.parallel.stages.value:
        return []
    wish = Wish("=", (1,)) if piped == {True} else Wish(">=", (2,))
    other = replace(spec, parallel=replace(spec.parallel, pipeline=wish))
    space = enumerate_space(other)
    fitting = price(other, estimator, space, closed).fitting if space.families else []
    best = min(f.timeline.seconds for f in finalists)
    ranked = with_schedules(spec, estimator, _one_each(affordable(fitting, LARGE, MARGIN)[0], *MESH), closed, MARGIN)
    return [c for c in _one_each(list(filter(_small, ranked)), *MESH) if c.estimate.seconds < best][:FINALISTS]


def _small(c: Candidate) -> bool:
    """Whether compiling a plan to see whether it is faster costs little."""
    return c.work <= WORK and c.written <= WRITTEN


def _one_each(candidates: list[Candidate], *choices: str) -> list[Candidate]:
    """The first with every value of some choices: what closed forms miss they miss for all plans that share them."""
    found: dict[tuple[object, ...], Candidate] = {}
    for c in candidates:
        found.setdefault(tuple(getattr(c.strategy, name) for name in choices), c)
    return list(found.values())


def _runner_up(finalist: Finalist) -> RunnerUp:
    return RunnerUp(finalist.strategy, finalist.timeline.seconds, finalist.ledger.peak, finalist.ledger.verdict)


def _notes(space: Space, fitting: int, compiled: int, lost: float) -> tuple[str, ...]:
    found = []
    if lost > 0:
        found.append(
            f"plans of more than {LARGE} block calls were left out: the best of them is estimated {lost:.1%} faster,"
            f" within the {MARGIN:.0%} that a larger plan has to win by"
        )
    if compiled < fitting:
        found.append(f"of {space.size} legal strategies the {compiled} best by estimate were compiled and simulated")
    return tuple(found)
