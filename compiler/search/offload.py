"""Offload of activations, layer by layer: on every pipeline rank as few layers as bring it under the limit.

Layers that come first in a chunk wait longest for their backward, so these go to the host first. Whether that is better
than to recompute, the simulation of both plans says: copies that hide cost nothing, others wait for the link.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from titan.compiler.cost.memory import memory_ledger

if TYPE_CHECKING:
    from titan.compiler.cost.machine import Machine
    from titan.compiler.plan.program import Plan
    from titan.compiler.spec.schema import Spec
    from titan.compiler.strategy import Strategy

WITH_ACTIVATIONS = {"none": "activations", "optimizer": "both"}


def least_layers(spec: Spec, strategy: Strategy, machine: Machine, limit: int) -> tuple[Strategy, Plan] | None:
    """The strategy without recompute and with the activations of as few layers on the host as fit, and its plan; None
    where not even those of all layers do, or where it fits without."""
    from titan.compiler.lower import lower

    word = WITH_ACTIVATIONS.get(strategy.offload, strategy.offload)
    plain = replace(strategy, recompute="none", tiers=(), offload=word, offloaded=())
    every = lower(spec, plain)
    if memory_ledger(every, machine, limit).verdict != "fits":
        return None
    held = [sorted({layer for chunk in role.layers for layer in chunk}) for role in every.roles]
    few, many, best = [-1] * len(held), [len(layers) for layers in held], every
    while any(high - low > 1 for low, high in zip(few, many)):
        middle = [(low + high) // 2 if high - low > 1 else high for low, high in zip(few, many)]
        found = tuple(sorted({layer for layers, count in zip(held, middle) for layer in layers[:count]}))
        tried = replace(plain, offloaded=found) if found else replace(plain, offload=strategy.offload)
        plan = lower(spec, tried)
        fits = [role.upper <= limit for role in memory_ledger(plan, machine, limit).roles]
        if all(fits):
            plain, best = tried, plan
        many = [middle[k] if fits[k] else many[k] for k in range(len(held))]
        few = [few[k] if fits[k] else max(few[k], min(middle[k], many[k] - 1)) for k in range(len(held))]
    return (plain, best) if plain.offload == word else None


def sentence(strategy: Strategy) -> str:
    """The choice in words."""
    total, few = sum(strategy.stages), len(strategy.offloaded)
    which = f"activations of {few or total} of {total} layers wait on the host for their backward"
    return f"{which}: as few as fit, and their copies cost less than recomputing"
