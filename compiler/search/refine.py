"""The last step of the search: other plans near the best one, compiled and simulated.

Closed forms rank layouts to a few percent, and some choices (sequence parallelism, how state is sharded) stand for
others that they hardly tell apart. Where plans are small the winner is compared with everything that differs from it in
one choice, until nothing is faster; where there are few of them, before that with all that closed forms put near it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import field, replace
from itertools import product
from typing import TYPE_CHECKING

from titan.compiler.plan.frozen import dataclass
from titan.compiler.schedules.registry import schedule_row
from titan.compiler.search.loss import loss_rows
from titan.compiler.search.space import allowed, options, schedules
from titan.compiler.spec.divisors import divisors
from titan.compiler.spec.legality import is_legal
from titan.compiler.strategy import Strategy

if TYPE_CHECKING:
    from titan.compiler.search.space import Space
    from titan.compiler.spec.schema import Spec

FEW = 1_000  # legal strategies of which every one gets a closed form of its own
PATIENCE = 40  # of them in the order of their estimates that are slower, one after another, before that is enough
NEAR = 1.05  # times the best simulated step: a plan with a longer estimate is not simulated for it


@dataclass(slots=True)
class Rivals:
    """The fastest strategy so far, and those that it was compared with. `guess` gives seconds by closed forms,
    `measure` those of the compiled plan, None where it does not fit; so many `tries` are left."""

    best: Strategy
    seconds: float
    guess: Callable[[Strategy], float]
    measure: Callable[[Strategy], float | None]
    tries: int
    known: set[Strategy] = field(default_factory=set)

    def faster(self, s: Strategy) -> bool:
        """Whether a strategy that has not been tried is faster than the best, whose place it then takes."""
        if s in self.known or self.tries == 0:
            return False
        self.tries -= 1
        self.known.add(s)
        found = self.measure(s)
        if found is None or found >= self.seconds:
            return False
        self.best, self.seconds = s, found
        return True


def refine(spec: Spec, space: Space, rivals: Rivals) -> Strategy:
    """The fastest of a small space's strategies near the best, and of all that single changes lead to from there."""
    rivals.known.add(rivals.best)
    if space.size <= FEW:
        guessed = ((rivals.guess(s), n, s) for n, s in enumerate(dict.fromkeys(variants(spec, space))))
        near = sorted((row for row in guessed if row[0] < NEAR * rivals.seconds), key=lambda row: row[:2])
        misses = 0
        for seconds, _, s in near:
            if seconds < NEAR * rivals.seconds and misses < PATIENCE:
                misses = 0 if rivals.faster(s) else misses + 1
    while any(rivals.faster(s) for s in sorted(dict.fromkeys(neighbours(spec, rivals.best)), key=rivals.guess)):
        pass
    return rivals.best


def variants(spec: Spec, space: Space) -> Iterator[Strategy]:
    """Every legal strategy, those too for which others stand in the space; none whose order must be searched for."""
    tiers = allowed(spec, "recompute")
    for s in space.candidates:
        parallels = allowed(spec, "sequence_parallel", idle=s.tensor == 1)
        orders = [row for row in schedules(spec, s.pipeline, s.micro_batches) if row[0] != "solved"]
        for parallel, option, order, tier in product(parallels, options(spec, s), orders, tiers):
            name, chunks = order
            if option != options(spec, s)[0] and not _shared(spec, s, name):
                continue
            yield from _legal(
                spec,
                replace(s, **option, sequence_parallel=parallel, schedule=name, wished_chunks=chunks, recompute=tier),
            )


def _shared(spec: Spec, s: Strategy, schedule: str) -> bool:
    """Whether some ranks hold the same state, so that ways to shard it differ."""
    return s.data * s.context * schedule_row(schedule).copies > 1 or (spec.model.tied and s.pipeline > 1)


def neighbours(spec: Spec, s: Strategy) -> Iterator[Strategy]:
    """Legal strategies that differ in one choice, or in how they save memory; stages are left open where the places of
    layers change."""
    for option, (tier, each) in product(options(spec, s), _tiers(spec, s)):
        # both save memory: one may make up for the other
        yield from _legal(spec, replace(s, **option, recompute=tier, tiers=each))
    for parallel in allowed(spec, "sequence_parallel", idle=s.tensor == 1):
        yield from _legal(spec, replace(s, sequence_parallel=parallel))
    listed = spec.parallel.stages.value or ()
    if s.pipeline > 1 and s.written_order is None:
        yield from _legal(spec, replace(s, stages=listed))
    for name, chunks in schedules(spec, s.pipeline, s.micro_batches):
        if name != s.schedule and name != "solved":
            changed = replace(s, schedule=name, wished_chunks=chunks, stages=listed, written_order=None)
            yield from _legal(spec, changed)
    batch = s.micro_batch * s.micro_batches
    for size in (b for b in divisors(batch) if spec.parallel.micro_batch.allows(b)):
        rows, changed = loss_rows(spec, size, s.context, s.tensor), s
        if size != s.micro_batch:
            changed = replace(s, micro_batch=size, micro_batches=batch // size, stages=listed, written_order=None)
        for some in {rows, rows if spec.parallel.loss_rows.fixed else 0}:  # logits may be kept where that fits
            yield from _legal(spec, replace(changed, loss_rows=some))


def _tiers(spec: Spec, s: Strategy) -> list[tuple[str, tuple[str, ...]]]:
    """Ways to recompute beside a strategy's, with the tier of each layer. Instead of layers unlike each other, which
    just fit, another way to save memory may leave nothing to recompute."""
    alike: list[tuple[str, tuple[str, ...]]] = [(tier, ()) for tier in allowed(spec, "recompute")]
    own = [(s.recompute, s.tiers)]
    return own if s.recompute == "adaptive" else [*own, *alike[:1]] if s.recompute == "mixed" else alike


def _legal(spec: Spec, s: Strategy) -> Iterator[Strategy]:
    """Layers unlike each other are no wish: they are legal where any tier is."""
    if is_legal(spec, s if s.recompute != "mixed" else s.but(recompute=allowed(spec, "recompute")[0], tiers=())):
        yield s
