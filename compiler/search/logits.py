"""Logits of the best candidates kept, where they fit: forming them in pieces, twice, is for those that do not."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from titan.compiler.cost.estimate import Estimator
from titan.compiler.search.candidates import Candidate, saved
from titan.compiler.search.ladder import Ladders
from titan.compiler.search.loss import loss_rows
from titan.compiler.search.space import schedules
from titan.compiler.spec.divisors import divisors
from titan.compiler.spec.legality import is_legal
from titan.compiler.strategy import Strategy

if TYPE_CHECKING:
    from titan.compiler.spec.schema import Spec

BEST = 4  # layouts that are tried with all their logits, each with every micro-batch


def with_kept_logits(
    spec: Spec, estimator: Estimator, ranked: list[Candidate], limit: int, margin: float
) -> list[Candidate]:
    """`ranked` with what may be faster when logits are kept, of the layouts with the least bounds; the closed forms,
    which are wrong by about `margin`, rank them all."""
    if spec.parallel.loss_rows.fixed:
        return ranked
    bounds: dict[Strategy, float] = {}
    least = (1 + margin) * min((c.estimate.seconds for c in ranked), default=0.0)
    for c in ranked:
        bound = estimator.bound(c.strategy)
        if bound < least:
            layout = _without_savings(c.strategy)
            bounds[layout] = min(bound, bounds.get(layout, bound))
    found: list[Candidate] = []
    ladders = Ladders(spec)
    for layout in sorted(bounds, key=lambda layout: bounds[layout])[:BEST]:
        for s in _every_batch(spec, layout):
            if loss_rows(spec, s.micro_batch, s.context, s.tensor) and estimator.bound(s) < least:
                kept = saved(ladders, estimator, Candidate(s, estimator.estimate(s)), limit)
                if kept.estimate.memory <= limit and kept.estimate.seconds < least:
                    found.append(kept)
    return sorted((*found, *ranked), key=lambda c: c.key) if found else ranked


def _without_savings(s: Strategy) -> Strategy:
    """The layout alone: the micro-batch and what saves memory are chosen anew."""
    return s.but(micro_batch=1, micro_batches=s.micro_batch * s.micro_batches, recompute="none", loss_rows=0)


def _every_batch(spec: Spec, layout: Strategy) -> list[Strategy]:
    found = []
    for size in divisors(layout.micro_batches):
        number = layout.micro_batches // size
        if not spec.parallel.micro_batch.allows(size):
            continue
        if layout.pipeline > 1 and layout.schedule not in dict(schedules(spec, layout.pipeline, number)):
            continue
        s = replace(layout, micro_batch=size, micro_batches=number)
        if not spec.parallel.recompute.allows("none"):
            s = replace(s, recompute=spec.parallel.recompute.values[0])
        if is_legal(spec, s):
            found.append(s)
    return found
