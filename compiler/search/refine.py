"""The last step of the search: small changes of the best plan, compiled and simulated.

Closed forms rank layouts to a few percent, and some choices (sequence parallelism, how state is sharded) stand for
others that they hardly tell apart. Where plans are small the winner is compared with everything that differs from it in
one choice, until nothing is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from titan.compiler.search.loss import loss_rows
from titan.compiler.search.space import allowed, schedules, shardings
from titan.compiler.spec.divisors import divisors
from titan.compiler.spec.legality import is_legal
from titan.compiler.strategy import Strategy

if TYPE_CHECKING:
    from titan.compiler.spec.schema import Spec


WORTH = 0.003  # share of a step that a change must save: less is below what the prices know


def refine(
    spec: Spec,
    start: Strategy,
    seconds: float,
    guess: Callable[[Strategy], float],
    measure: Callable[[Strategy], float | None],
    tries: int,
) -> Strategy:
    """The fastest of all that single changes lead to from `start`, which takes `seconds`; at most `tries` are measured.
    `guess` orders them by closed forms; `measure` gives the seconds of a strategy, None where it does not fit."""
    best, known = start, {start}
    moved = True
    while moved:
        moved = False
        for changed in sorted(dict.fromkeys(neighbours(spec, best)), key=guess):
            if changed in known:
                continue
            if tries == 0:
                return best
            tries -= 1
            known.add(changed)
            found = measure(changed)
            if found is not None and found < (1 - WORTH) * seconds:
                best, seconds, moved = changed, found, True
                break
    return best


def neighbours(spec: Spec, s: Strategy) -> Iterator[Strategy]:
    """Legal strategies that differ in one choice, or in how they save memory; stages are left open where the places of
    layers change."""
    plain = ({"zero": 0},) if spec.parallel.zero.allows(0) else ()
    tiers = (s.recompute,) if s.recompute in ("mixed", "adaptive") else allowed(spec, "recompute")
    for option, tier in product(
        (*plain, *shardings(spec, s)), tiers
    ):  # both save memory: one may make up for the other
        yield from _legal(spec, replace(s, **option, recompute=tier))
    for parallel in allowed(spec, "sequence_parallel", idle=s.tensor == 1):
        yield from _legal(spec, replace(s, sequence_parallel=parallel))
    listed = spec.parallel.stages.value or ()
    for name, chunks in schedules(spec, s.pipeline, s.micro_batches):
        if name != s.schedule and name != "solved":
            changed = replace(s, schedule=name, wished_chunks=chunks, stages=listed, written_order=None)
            yield from _legal(spec, changed)
    batch = s.micro_batch * s.micro_batches
    for size in (b for b in divisors(batch) if b != s.micro_batch and spec.parallel.micro_batch.allows(b)):
        changed = replace(s, micro_batch=size, micro_batches=batch // size, stages=listed, written_order=None)
        rows = loss_rows(spec, size, s.context, s.tensor)
        yield from _legal(spec, replace(changed, loss_rows=rows))


def _legal(spec: Spec, s: Strategy) -> Iterator[Strategy]:
    if is_legal(spec, s):
        yield s
