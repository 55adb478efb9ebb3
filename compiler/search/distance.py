"""How far ahead of their use parameters are gathered and activations come back from the host: by price and memory.

One layer ahead hides what takes no longer than that layer. More is faster where a layer computes little (an
embedding), where gathers are longer than some layers and shorter than others, and while a stage waits for another; it
costs the memory of one more layer each time. So the distance grows as long as the simulation of the plan gains by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan.compiler.cost.simulate import simulate
from titan.compiler.cost.timeline import Timeline
from titan.compiler.plan.frozen import dataclass
from titan.compiler.search.measured import measured
from titan.compiler.search.reasons import gib

if TYPE_CHECKING:
    from titan.compiler.cost.machine import Machine
    from titan.compiler.cost.memory import MemoryLedger
    from titan.compiler.plan.program import Plan
    from titan.compiler.search.tiers import Tried
    from titan.compiler.spec.schema import Spec
    from titan.compiler.strategy import Strategy

WORTH = 0.001  # share of a step that a layer's memory must buy
FARTHEST = 4


@dataclass(frozen=True)
class Finalist:
    """A compiled and simulated plan. `tried`: what was measured to choose its tiers of recompute, if it was."""

    strategy: Strategy
    plan: Plan
    timeline: Timeline
    ledger: MemoryLedger
    tried: Tried | None = None


def fetches(s: Strategy) -> bool:
    """Whether anything is gathered for each micro-batch, or comes from the host for it."""
    sharded = s.zero == 3 and s.gather == "each" and s.data * s.context > 1
    return sharded or s.offload in ("activations", "both")


def distances(spec: Spec, start: Finalist, machine: Machine, limit: int) -> tuple[Finalist, str]:
    """The plan with the distance from which on another layer gains nothing or does not fit, and why it is that one."""
    best, first = start, start.strategy.prefetch
    for distance in range(first + 1, FARTHEST + 1):
        if not spec.parallel.prefetch.allows(distance):
            return best, _sentence(start, best, "more is not allowed")
        strategy = best.strategy.but(prefetch=distance)
        found = measured(spec, strategy, machine, limit)
        plan, ledger = found.plan, found.ledger
        if ledger.verdict != start.ledger.verdict:
            return best, _sentence(start, best, f"{distance} would hold {gib(ledger.peak)} of {gib(limit)}")
        timeline = simulate(plan, machine)
        if timeline.step > (1 - WORTH) * best.timeline.step:
            gain = f"{1 - timeline.step / best.timeline.step:.2%} for {gib(ledger.peak - best.ledger.peak)}"
            return best, _sentence(start, best, f"{distance} would gain {gain}")
        best = Finalist(strategy, plan, timeline, ledger)
    return best, _sentence(start, best, "no more are tried")


def _sentence(start: Finalist, best: Finalist, end: str) -> str:
    mine, first = best.strategy.prefetch, start.strategy.prefetch
    where = f"{mine} layer{'' if mine == 1 else 's'} ahead: "
    if mine == first:
        return where + end
    gain, cost = 1 - best.timeline.step / start.timeline.step, best.ledger.peak - start.ledger.peak
    return f"{where}{gain:.2%} faster than {first} for {gib(cost)}; {end}"
