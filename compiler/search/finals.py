"""The last part of a search: what is fastest by estimate is compiled and simulated, until enough plans fit; what holds
more than estimated is tried again with less, and small plans are compared with all that is near them.

How many plans are compiled follows from their size, never from the clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from titan.compiler.cost.estimate import Estimator
from titan.compiler.cost.simulate import simulate
from titan.compiler.search.candidates import Candidate, saved, with_stages
from titan.compiler.search.distance import Finalist
from titan.compiler.search.improve import explained, free_tiers
from titan.compiler.search.ladder import Ladders
from titan.compiler.search.measured import Measured, ignored, measured
from titan.compiler.search.orders import finished
from titan.compiler.search.reasons import reasons
from titan.compiler.search.space import Space
from titan.compiler.search.tiers import with_tiers
from titan.compiler.strategy import Strategy

if TYPE_CHECKING:
    from titan.compiler.plan.program import Plan
    from titan.compiler.spec.schema import Spec

FINALISTS = 4  # plans that are compiled and simulated
SMALL = 1_000  # block calls up to which there may be more of them
WORK = 4_000  # block calls that they may have together, beyond the first two; a larger plan stands alone
MENDED = 4  # plans that hold more than the closed forms say, and get a tier of recompute for each layer instead
MENDABLE = 1.15  # of the limit: a plan that holds more than estimated by more than that is left to the next
TRIES = 24  # compiled plans that turn out not to fit before the search gives up
REFINING = 12_000  # block calls of the changes of the best plan that are compiled
UNSURE = 1.25  # times the limit, by estimate: whether such a plan fits is for its own ledger to say
FEWEST = 10  # changes of the best plan that are worth trying when as many can be compiled


class Finals:
    """Plans of one spec that must have one of some verdicts beside a limit of bytes; `closed` is that of closed forms,
    `everything` what reasons compare a plan with."""

    def __init__(
        self,
        spec: Spec,
        estimator: Estimator,
        limit: int,
        closed: int,
        verdicts: tuple[str, ...],
        everything: tuple[Candidate, ...],
    ) -> None:
        self.spec, self.estimator, self.machine = spec, estimator, estimator.machine
        self.limit, self.closed, self.verdicts, self.everything = limit, closed, verdicts, everything
        self.mended = 0

    def compile(self, ranked: list[Candidate], likely: Callable[[Plan], None] = ignored) -> list[Finalist]:
        """Finalists in order of their estimates, until enough of them have one of the verdicts. One that will stand
        alone is `likely`."""
        found: list[Finalist] = []
        queue, work, self.mended = ranked[:TRIES], 0, 0
        most = TRIES if self.machine.cores else FINALISTS  # closed forms know little of ranks that share cores
        for _ in range(TRIES):
            if not queue:
                break
            candidate = queue.pop(0)
            work += candidate.work
            enough = 1 if candidate.work > WORK else 2
            if (len(found) >= most and work > SMALL) or (len(found) >= enough and work > WORK):
                break
            alone = enough == 1 and not found
            finalist, over = self._compiled(candidate, likely if alone else ignored)
            if finalist is not None:
                found.append(finalist)
            elif (again := self._thriftier(candidate, over)) is not None:
                slower = (n for n, c in enumerate(queue) if c.key > again.key)
                queue.insert(next(slower, len(queue)), again)
        return found

    def _compiled(self, candidate: Candidate, likely: Callable[[Plan], None]) -> tuple[Finalist | None, int]:
        """The plan of a candidate with its time, where it has one of the verdicts; and bytes that it holds beyond the
        limit as it was estimated. It may get a tier of recompute for each layer for that."""
        from titan.compiler.lower import with_settings

        spec, limit, tried = self.spec, self.limit, None
        chosen = self._told(replace(candidate, strategy=finished(candidate, self.estimator, self.closed)))
        why = chosen.strategy.reasons
        if chosen.strategy.recompute == "adaptive":
            tiered = with_tiers(spec, chosen.strategy, self.machine, limit)
            why = explained(tiered.strategy, tiered.counts)
            chosen = replace(chosen, strategy=replace(tiered.strategy, reasons=why))
            plan, ledger = with_settings(spec, tiered.plan, chosen.strategy), tiered.ledger
        else:
            # most that are estimated to fit do: it is likely before it is measured
            own = measured(spec, chosen.strategy, self.machine, limit, lowered=likely)
            plan, ledger = own.plan, own.ledger
        over = (ledger.peak if "at risk" in self.verdicts else ledger.upper) - limit
        mend = (self.mended < MENDED or candidate.work <= SMALL) and ledger.upper <= MENDABLE * limit
        if ledger.verdict not in self.verdicts and mend and free_tiers(spec, chosen.strategy):
            tiered = with_tiers(spec, chosen.strategy, self.machine, limit, Measured(plan, ledger))
            plan, ledger, tried, self.mended = tiered.plan, tiered.ledger, tiered.tried, self.mended + 1
            why = explained(tiered.strategy, tiered.counts)
            chosen = replace(chosen, strategy=tiered.strategy)
        if ledger.verdict not in self.verdicts:
            return None, over
        likely(plan)
        timeline = simulate(plan, self.machine)
        return Finalist(replace(chosen.strategy, reasons=why), plan, timeline, ledger, tried), over

    def _told(self, chosen: Candidate) -> Candidate:
        """With the reasons of its choices."""
        why = reasons(self.spec, self.estimator, chosen, self.everything, self.closed)
        return replace(chosen, strategy=replace(chosen.strategy, reasons=why))

    def _thriftier(self, candidate: Candidate, over: int) -> Candidate | None:
        """A small plan with the fastest of the ways to save memory that, by estimate, hold so much less than it."""
        most = candidate.estimate.memory - over
        if candidate.work > WORK or over <= 0:
            return None
        found = saved(Ladders(self.spec), self.estimator, candidate, most)
        return found if found.estimate.memory <= most else None

    def refined(self, space: Space, best: Finalist) -> Finalist:
        """The fastest plan near a small one."""
        start, estimator = replace(best.strategy, reasons=()), self.estimator
        formed = estimator.estimate(start)
        tries = REFINING // Candidate(start, formed).work
        if tries < FEWEST:
            return best
        from titan.compiler.search.refine import Rivals, refine

        plans: dict[Strategy, Finalist] = {start: best}

        def guess(s: Strategy) -> float:
            staged = with_stages(Candidate(s, formed), estimator, round(UNSURE * self.closed))
            return estimator.estimate(staged, UNSURE * self.closed).seconds

        def measure(s: Strategy) -> float | None:
            found = self._split(s)
            if found is None:
                return None
            plans[s] = found
            return found.timeline.seconds

        found = plans[refine(self.spec, space, Rivals(start, best.timeline.seconds, guess, measure, tries))]
        if found is best:
            return best
        told = self._told(Candidate(found.strategy, estimator.estimate(found.strategy)))
        return replace(found, strategy=told.strategy)

    def _split(self, s: Strategy) -> Finalist | None:
        """The plan of a strategy, where it has one of the verdicts: with its layers split for time where that fits by
        its own ledger, else as closed forms say that it does."""
        candidate, known = Candidate(s, self.estimator.estimate(s)), None
        for room in (round(UNSURE * self.closed), self.closed):
            strategy = finished(candidate, self.estimator, room)
            if strategy == known:
                break
            known, found = strategy, measured(self.spec, strategy, self.machine, self.limit)
            if found.ledger.verdict in self.verdicts:
                return Finalist(strategy, found.plan, simulate(found.plan, self.machine), found.ledger)
        return None
