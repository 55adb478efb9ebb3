"""Offload of activations, layer by layer: on every pipeline rank as few layers as bring it under the limit.

Layers that come first in a chunk wait longest for their backward, so these go to the host first. Whether that is better
than to recompute, the simulation of both plans says: copies that hide cost nothing, others wait for the link.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from titan.compiler.search.measured import Measured, measured

if TYPE_CHECKING:
    from titan.compiler.cost.machine import Machine
    from titan.compiler.spec.schema import Spec
    from titan.compiler.strategy import Strategy

WITH_ACTIVATIONS = {"none": "activations", "optimizer": "both"}


def least_layers(spec: Spec, strategy: Strategy, machine: Machine, limit: int) -> tuple[Strategy, Measured] | None:
    """The strategy without recompute and with the activations of as few layers on the host as fit, and its plan; None
    where not even those of all layers do, or where it fits without."""
    word = WITH_ACTIVATIONS.get(strategy.offload, strategy.offload)
    plain = replace(strategy, recompute="none", tiers=(), offload=word, offloaded=())
    best = measured(spec, plain, machine, limit)
    if best.ledger.verdict != "fits":
        return None
    held = [sorted({layer for chunk in role.layers for layer in chunk}) for role in best.plan.roles]
    away = {layer for layers in held for layer in layers}  # in `best`
    few, many = [-1] * len(held), [len(layers) for layers in held]
    while any(high - low > 1 for low, high in zip(few, many)):
        middle = [(low + high) // 2 if high - low > 1 else high for low, high in zip(few, many)]
        found = {layer for layers, count in zip(held, middle) for layer in layers[:count]}
        less = {"offloaded": tuple(sorted(found))} if found else {"offload": strategy.offload}
        changed = {k for k, layers in enumerate(held) if (found ^ away).intersection(layers)}
        tried = best.with_ranks(measured(spec, plain.but(**less), machine, limit, changed), changed)
        fits = [role.upper <= limit for role in tried.ledger.roles]
        if all(fits):
            plain, best, away = plain.but(**less), tried, found
        many = [middle[k] if fits[k] else many[k] for k in range(len(held))]
        few = [few[k] if fits[k] else max(few[k], min(middle[k], many[k] - 1)) for k in range(len(held))]
    return (plain, best) if plain.offload == word else None


def sentence(strategy: Strategy) -> str:
    """The choice in words."""
    total, few = sum(strategy.stages), len(strategy.offloaded)
    which = f"activations of {few or total} of {total} layers wait on the host for their backward"
    return f"{which}: as few as fit, and their copies cost less than recomputing"
