"""The best plan by the objective: least step time, money per token, or memory, within all limits.

`search` finds the fastest plan on given devices in given memory. Everything else is asked of it: fewer devices are a
smaller cluster, and less memory is a smaller limit (the epsilon-constraint method of multi-objective optimisation).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from titan.compiler.cost.memory import memory_ledger
from titan.compiler.plan.frozen import dataclass
from titan.compiler.search.measured import ignored
from titan.compiler.search.search import SearchResult, fitting_by_estimate, memory_limit, search
from titan.compiler.spec.devices import parts
from titan.grammar.diagnostics import Diagnostic, Note, TitanError

if TYPE_CHECKING:
    from titan.compiler.plan.program import Plan
    from titan.compiler.spec.schema import Spec

TRIED = 3  # sizes of the cluster whose plans are compiled, best first by the closed forms
NEAR = 1.1  # times a limit: closed forms above that are not compiled
EQUAL = 1.005  # ratio within which two plans are as good: less than what prices can tell apart
CLOSE = 1.01  # ratio of what fits and what does not at which the least memory is known
ROUNDS = 10
STATE = 16  # bytes of parameters, gradients and optimizer state per parameter, whichever the precision: at least


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan and the part of the cluster that it is for."""

    spec: Spec
    result: SearchResult

    @property
    def devices(self) -> int:
        return self.spec.cluster.world_size

    @property
    def seconds(self) -> float:
        return self.result.timeline.seconds

    @property
    def memory(self) -> int:
        return self.result.ledger.peak

    @property
    def hours(self) -> float:
        """Device-hours per token: money per token is this times the price."""
        return device_hours(self.spec, self.seconds) / self.spec.train.tokens_per_step


def device_hours(spec: Spec, seconds: float) -> float:
    """Device-hours of one step."""
    return spec.cluster.world_size * seconds / 3600


def best(spec: Spec, likely: Callable[[Plan], None] = ignored) -> Choice:
    """The best plan by the spec's objective, with what it left idle said in the spec's warnings. `likely` is told of
    plans as `search` tells it.

    Raises TitanError T302 when no layout is legal (exit code 2), T301 when none fits, T307 when none keeps the limits
    (exit code 3).
    """
    objective = spec.objective
    if not objective.fewer:
        found = Choice(spec, search(spec, likely=likely))
        tried = [found]
    else:
        tried = list(_compiled(spec))
        kept = [c for c in tried if not broken(c)] or tried
        found = _least([c for c in kept if c.result.ledger.verdict == "fits"] or kept)
    _check_limits(found)
    if objective.goal == "memory":
        found = _least_memory(found)
    return _explained(spec, found, tried)


def _least(choices: list[Choice]) -> Choice:
    """The choice with the least of the goal; of those that are as good as that the fastest."""

    def value(choice: Choice) -> float:
        goal = choice.spec.objective.goal
        return {"step_time": choice.seconds, "cost": choice.hours, "memory": float(choice.memory)}[goal]

    least = min(map(value, choices))
    return min((c for c in choices if value(c) <= EQUAL * least), key=lambda c: (c.seconds, c.devices))


def _compiled(spec: Spec) -> Iterator[Choice]:
    """The fastest plans of the most promising parts of the cluster. Raises the error of the first when none has any."""
    first: TitanError | None = None
    number = 0
    for part in _ranked(spec) or parts(spec)[:1]:
        try:
            yield Choice(part, search(part))
            number += 1
        except TitanError as error:
            first = first or error
        if number == TRIED:
            return
    if not number and first is not None:
        raise first


def _ranked(spec: Spec) -> list[Spec]:
    """Parts of the cluster, best first by the closed forms of their fastest plan; without those that hopelessly break a
    limit while others do not."""
    found: list[tuple[bool, float, int, Spec]] = []
    for part in parts(spec):
        fitting = [] if hopeless(part) else fitting_by_estimate(part)
        if not fitting:
            continue
        fastest = fitting[0].estimate
        seconds, devices = fastest.seconds, part.cluster.world_size
        values = {
            "step_time": seconds,
            "cost": seconds * devices,
            "memory": float(min(c.estimate.memory for c in fitting)),
        }
        found.append((bool(_over(part, seconds / NEAR)), values[spec.objective.goal], devices, part))
    return [part for *_, part in sorted(found, key=lambda row: row[:3])]


def hopeless(spec: Spec) -> bool:
    """Whether parameters, gradients and optimizer state alone, sharded over everything, are more than there is."""
    return spec.model.parameter_count() * STATE > spec.cluster.world_size * memory_limit(spec)


def _over(spec: Spec, seconds: float) -> list[tuple[str, str, str]]:
    """(limit, what it is, what it may be) that a step of so many seconds breaks."""
    objective, found = spec.objective, []
    if objective.step_time is not None and seconds > objective.step_time:
        found.append(("step_time", f"{seconds:.4g} s", f"{objective.step_time:g} s"))
    if objective.cost is not None:
        cost = job_cost(spec, seconds)
        if cost is not None and cost > objective.cost:
            found.append(("cost", f"{cost:,.2f} USD", f"{objective.cost:,.2f} USD"))
    return found


def job_cost(spec: Spec, seconds: float) -> float | None:
    """Money of the whole job; None without a price or an end."""
    price_of, steps = spec.cluster.price_per_device_hour, spec.train.total_steps
    return None if price_of is None or steps is None else price_of * steps * device_hours(spec, seconds)


def broken(choice: Choice) -> list[tuple[str, str, str]]:
    return _over(choice.spec, choice.seconds)


def _check_limits(choice: Choice) -> None:
    """Raises TitanError T307 with both numbers of each limit that the best plan breaks."""
    over = broken(choice)
    if not over:
        return
    key, value, limit = over[0]
    message = f"no plan keeps {key} <= {limit}: the best found has {value} on {choice.devices:,} devices"
    notes = tuple(Note(f"{k} {v}, limit {most}") for k, v, most in over[1:])
    span = choice.spec.span(f"objective.{key}")
    raise TitanError(Diagnostic("T307", message, span, nearest=(f"{key} <= {value}",), notes=notes), exit_code=3)


def _least_memory(found: Choice) -> Choice:
    """The fastest plan in the least memory in which there is one, to 1%, by bisection of the limit."""
    spec = found.spec
    high, low = found.result.ledger.upper, spec.model.parameter_count() * STATE // spec.cluster.world_size
    for _ in range(ROUNDS):
        if high <= CLOSE * low:
            break
        middle = (low + high) // 2
        smaller = within(spec, middle)
        if smaller is None or broken(smaller):
            low = middle
        else:
            found, high = smaller, smaller.result.ledger.upper
    return found


def within(spec: Spec, limit: int) -> Choice | None:
    """The fastest plan whose upper bound of memory is at most `limit` bytes; None when there is none."""
    from titan.compiler.lower import with_settings

    share = min(limit / spec.cluster.device.memory, 1.0)
    tight = replace(spec, objective=spec.objective.model_copy(update={"memory_fraction": share}))
    try:
        result = search(tight, risk=False)
    except TitanError:
        return None
    plan = with_settings(spec, result.plan, result.strategy)  # with the limit that the user set
    return Choice(spec, replace(result, plan=plan, ledger=memory_ledger(plan, limit=memory_limit(spec))))


def _explained(spec: Spec, found: Choice, tried: list[Choice]) -> Choice:
    """What the objective decided, as notes of the result; idle devices as a warning."""
    notes, goal = [], spec.objective.goal
    for other in sorted((c for c in tried if c.devices != found.devices), key=lambda c: -c.devices):
        shares = (
            f"step time {other.seconds / found.seconds - 1:+.1%}, cost per token {other.hours / found.hours - 1:+.1%}"
        )
        notes.append(f"on {other.devices:,} devices: {shares}")
    if goal == "memory":
        notes.append(f"no plan found in 1% less memory than {found.memory / 2**30:.2f} GiB within the limits")
    result = replace(found.result, notes=(*found.result.notes, *notes))
    idle = spec.cluster.world_size - found.devices
    if not idle:
        return Choice(found.spec, result)
    used = f"{found.devices:,} of {spec.cluster.world_size:,} devices are used, {idle:,} stay idle"
    message = f"{used}: {_why(spec, found, tried)}"
    warning = Diagnostic("T308", message, spec.span("objective.goal"), severity="warning")
    return Choice(replace(found.spec, warnings=(*spec.warnings, warning)), result)


def _why(spec: Spec, found: Choice, tried: list[Choice]) -> str:
    larger = max(tried, key=lambda c: c.devices)
    if larger.devices > found.devices and spec.objective.goal == "cost":
        return f"a token costs {larger.hours / found.hours - 1:.1%} more on {larger.devices:,}"
    if spec.objective.devices is not None and found.devices <= spec.objective.devices:
        return f"the objective has devices <= {spec.objective.devices:,}"
    return f"{spec.objective.goal} is least there within the limits"
