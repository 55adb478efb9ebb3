"""One thing changed in a compiled plan where that makes it faster: a tier of recompute for each layer, activations on
the host in its place, longer distances of what is fetched."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from titan.compiler.cost.simulate import simulate
from titan.compiler.search.candidates import LARGE, Candidate
from titan.compiler.search.distance import Finalist, distances, fetches
from titan.compiler.search.measured import Measured
from titan.compiler.search.offload import WITH_ACTIVATIONS, least_layers
from titan.compiler.search.offload import sentence as host_sentence
from titan.compiler.search.space import allowed
from titan.compiler.search.tiers import Counts, recomputing, sentence, with_tiers
from titan.compiler.strategy import Strategy

if TYPE_CHECKING:
    from titan.compiler.cost.estimate import Estimator
    from titan.compiler.cost.machine import Machine
    from titan.compiler.plan.program import Plan
    from titan.compiler.spec.schema import Spec

SHORT = 50_000  # instructions of a plan that is compiled several times to put few layers on the host
WORTH = 0.02  # share of a step that recompute must take for the host to be tried in its place


def layer_by_layer(spec: Spec, best: Finalist, machine: Machine, limit: int) -> Finalist:
    """The same plan with a recompute tier for each layer, where one for all layers recomputes more than it must."""
    if best.strategy.recompute == "none" or not free_tiers(spec, best.strategy):
        return best
    tiered = with_tiers(spec, best.strategy, machine, limit, Measured(best.plan, best.ledger))
    timeline = simulate(tiered.plan, machine)
    if timeline.step >= best.timeline.step or tiered.ledger.verdict != "fits":
        return replace(best, tried=tiered.tried)
    strategy = replace(tiered.strategy, reasons=explained(tiered.strategy, tiered.counts))
    return Finalist(strategy, tiered.plan, timeline, tiered.ledger, tiered.tried)


def on_host(spec: Spec, best: Finalist, machine: Machine, limit: int) -> Finalist:
    """The same plan with activations on the host in place of recompute, or of some of it, where that is faster."""
    word = WITH_ACTIVATIONS.get(best.strategy.offload, "none")
    free = free_tiers(spec, replace(best.strategy, recompute="none")) and word in allowed(spec, "offload")
    if best.strategy.recompute in ("none", "adaptive") or not free:
        return best
    if recomputing(best.plan, machine) < WORTH * best.timeline.seconds:
        return best
    plain = replace(best.strategy, recompute="none", tiers=(), offloaded=())
    tiered = with_tiers(spec, plain, machine, limit, host=word, tried=best.tried)
    if not tiered.strategy.layers_on_host:  # to rebuild is cheaper, layer by layer
        return best
    only = least_layers(spec, best.strategy, machine, limit) if _short(tiered.plan) else None
    if only is not None:
        why = {"offload": host_sentence(only[0]), "recompute": "the host holds what would not fit"}
        told = tuple((k, o, why.get(k, text)) for k, o, text in only[0].reasons)
        timeline = simulate(only[1].plan, machine)
        if timeline.step < best.timeline.step and only[1].ledger.verdict == "fits":
            return Finalist(replace(only[0], reasons=told), only[1].plan, timeline, only[1].ledger)
    timeline = simulate(tiered.plan, machine)
    if tiered.ledger.verdict != "fits" or timeline.step >= best.timeline.step:
        return best
    strategy = replace(tiered.strategy, reasons=explained(tiered.strategy, tiered.counts))
    return Finalist(strategy, tiered.plan, timeline, tiered.ledger)


def _short(plan: Plan) -> bool:
    """Whether looking for the fewest layers on the host, which compiles the plan several times, costs little."""
    return sum(len(block.instructions) for role in plan.roles for block in role.blocks) <= SHORT


def further_ahead(spec: Spec, best: Finalist, estimator: Estimator, limit: int) -> Finalist:
    """The same plan with parameters gathered, or activations fetched, from as far ahead as is worth its memory."""
    work = Candidate(best.strategy, estimator.estimate(best.strategy)).work
    if not fetches(best.strategy) or spec.parallel.prefetch.fixed or work > LARGE:
        return best
    found, why = distances(spec, best, estimator.machine, limit)
    reasons = tuple((k, "search", why) if k == "prefetch" else (k, o, text) for k, o, text in found.strategy.reasons)
    return replace(found, strategy=replace(found.strategy, reasons=reasons))


def free_tiers(spec: Spec, strategy: Strategy) -> bool:
    """Whether each layer may have a tier of its own."""
    return len(allowed(spec, "recompute")) > 1 and strategy.recompute not in ("adaptive", "mixed")


def explained(strategy: Strategy, counts: tuple[Counts, ...]) -> tuple[tuple[str, str, str], ...]:
    """The reason of the choice; of an adaptive plan what it begins with."""
    words = sentence(counts)
    return tuple(
        (k, o, (f"{why}; begins with {words}" if o == "user" else words) if k == "recompute" else why)
        for k, o, why in strategy.reasons
    )
