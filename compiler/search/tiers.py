"""Recompute tiers, layer by layer: on every pipeline rank the least work that brings it under the limit.

What a tier stores and what its rebuild costs are read off plans with all layers in each tier; on one rank the layers of
a kind are alike, so only how many of them have each tier matters, and all counts are tried. The chosen plan is measured
again, and a rank that is still above the limit gets less room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

from titan.compiler.cost.memory import memory_ledger
from titan.compiler.cost.prices import Prices
from titan.compiler.plan.segment import TIERS
from titan.compiler.plan.sizes import Sizes

if TYPE_CHECKING:
    from titan.compiler.cost.machine import Machine
    from titan.compiler.plan.program import Plan, Role
    from titan.compiler.spec.schema import Spec
    from titan.compiler.strategy import Strategy

ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Counts:
    """Layers of a rank in each tier, and the seconds that they recompute in one micro-batch."""

    none: int
    selective: int
    full: int
    seconds: float


def fewest(layers: int, sizes: Sequence[float], costs: Sequence[float], limit: float) -> Counts:
    """The cheapest counts below `limit`: `sizes` are the bytes of a rank with all layers in each tier, `costs` the
    seconds of one layer's rebuild. Everything full when nothing fits."""
    best = Counts(0, 0, layers, layers * costs[2])
    if not layers:
        return best
    saved = [(sizes[0] - size) / layers for size in sizes]
    for full in range(layers + 1):
        missing = sizes[0] - limit - full * saved[2]
        selective = 0 if missing <= 0 else layers + 1 if saved[1] <= 0 else ceil(missing / saved[1] - 1e-9)
        if full + selective <= layers:
            seconds = full * costs[2] + selective * costs[1]
            if seconds < best.seconds or (full, selective) == (0, 0):
                best = Counts(layers - full - selective, selective, full, seconds)
    return best


def with_tiers(
    spec: Spec, strategy: Strategy, machine: Machine, limit: int, known: Plan | None = None
) -> tuple[Strategy, Plan, tuple[Counts, ...]]:
    """The strategy with a tier for each layer, its plan, and the counts of every pipeline rank. Of a strategy that is
    not adaptive, one that has the same tier everywhere says so in one word. `known`: the plan of the strategy itself,
    where there is one."""
    from titan.compiler.lower import lower

    word = "adaptive" if strategy.recompute == "adaptive" else "mixed"
    layers = sum(strategy.stages)
    freest = replace(strategy, recompute=word, tiers=("none",) * layers)
    first = lower(spec, freest)
    if memory_ledger(first, machine, limit).upper <= limit:
        return freest, first, tuple(Counts(sum(map(len, role.layers)), 0, 0, 0.0) for role in first.roles)
    given = {"none": first} | ({strategy.recompute: known} if known is not None else {})
    uniform = [given.get(tier) or lower(spec, replace(freest, tiers=(tier,) * layers)) for tier in TIERS]
    ledgers = [memory_ledger(plan, machine, limit) for plan in uniform]
    costs = [_rebuild_seconds(plan, machine) for plan in uniform]
    rooms = [float(limit)] * len(uniform[0].roles)
    for _ in range(ROUNDS):
        counts = []
        tiers = ["none"] * layers
        for number, role in enumerate(uniform[0].roles):
            held = sorted(layer for chunk in role.layers for layer in chunk)
            sizes = [ledger.roles[number].upper for ledger in ledgers]
            found = fewest(len(held), sizes, [cost[number] for cost in costs], rooms[number])
            counts.append(found)
            words = ("full",) * found.full + ("selective",) * found.selective + ("none",) * found.none
            for layer, tier in zip(held, words, strict=True):
                tiers[layer] = tier
        chosen = replace(strategy, recompute=word, tiers=tuple(tiers))
        plan = lower(spec, chosen)
        over = [role.upper - limit for role in memory_ledger(plan, machine, limit).roles]
        if all(excess <= 0 or found.none + found.selective == 0 for excess, found in zip(over, counts)):
            break
        rooms = [room - max(excess, 0) for room, excess in zip(rooms, over)]
    if word == "mixed" and len(set(tiers)) == 1:
        chosen = replace(strategy, recompute=tiers[0], tiers=())
        plan = lower(spec, chosen)
    return chosen, plan, tuple(counts)


def _rebuild_seconds(plan: Plan, machine: Machine) -> list[float]:
    """Per role, what one layer recomputes of a micro-batch, with the collectives of its rebuild."""
    prices, sizes = Prices(plan, machine), Sizes(plan)
    return [_of_role(role, prices, sizes) / max(sum(map(len, role.layers)), 1) for role in plan.roles]


def _of_role(role: Role, prices: Prices, sizes: Sizes) -> float:
    """Each chunk has a backward, whole or to inputs; a variant of it counts once."""
    found: dict[str, int] = {}
    for block in role.blocks:
        phase, _, rest = block.name.partition(".")
        if phase in ("B", "I") and "+" not in block.name:
            again = (i for i in block.instructions if sizes.runs(i) and any(w.startswith("r.") for w in i.writes))
            found[rest.partition(".")[0]] = sum(
                prices.price(role, i) for i in again if i.opcode == "recompute" or i.row.kind == "collective"
            )
    return sum(found.values()) * 1e-9


def sentence(counts: Sequence[Counts]) -> str:
    """The choice in words, rank by rank where they differ."""
    shown = [
        ", ".join(f"{n} {tier}" for tier, n in zip(TIERS, (c.none, c.selective, c.full)) if n) or "no layer"
        for c in counts
    ]
    if len(set(shown)) == 1:
        where = shown[0] + (" on every stage" if len(shown) > 1 else "")
    else:
        where = "; ".join(f"stage {k}: {text}" for k, text in enumerate(shown))
    most = max(c.seconds for c in counts)
    return f"{where}: the least that fits, {most * 1e3:.3g} ms of recomputing per micro-batch at most"
