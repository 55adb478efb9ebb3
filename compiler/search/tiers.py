"""Recompute tiers, layer by layer: on every pipeline rank the least work that brings it under the limit.

What a tier stores and what its rebuild costs are read off plans with all layers in each tier; on one rank the layers of
a kind are alike, so only how many of them have each tier matters, and all counts are tried. The chosen plan is measured
again, and a rank that is still above the limit gets less room; after some rounds, all of its layers recompute.

Where activations may wait in host memory that is one more way for a layer: it saves what the plan with all layers there
holds less, and costs what that plan takes longer. So each layer is kept, rebuilt or offloaded by its price per byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

from titan.compiler.cost.memory import MemoryLedger
from titan.compiler.cost.prices import Prices
from titan.compiler.cost.simulate import simulate
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.listing import weighted
from titan.compiler.plan.segment import TIERS
from titan.compiler.plan.sizes import Sizes
from titan.compiler.search.measured import Measured, measured

if TYPE_CHECKING:
    from titan.compiler.cost.machine import Machine
    from titan.compiler.plan.program import Plan, Role
    from titan.compiler.spec.schema import Spec
    from titan.compiler.strategy import Strategy

ROUNDS = 4  # in which a rank that is above the limit gets less room; unlike layers may miss it each time


@dataclass(frozen=True, slots=True)
class Counts:
    """Layers of a rank in each tier, the seconds that they cost in one micro-batch, and of those without recompute how
    many are on the host."""

    none: int
    selective: int
    full: int
    seconds: float
    away: int = 0


def fewest(layers: int, sizes: Sequence[float], costs: Sequence[float], limit: float) -> Counts:
    """The cheapest counts below `limit`: `sizes` are the bytes of a rank with all layers in each tier, `costs` the
    seconds of one layer's rebuild; the fourth of each, where there is one, are those with all layers on the host.
    Everything full when nothing fits."""
    best = Counts(0, 0, layers, layers * costs[2])
    if not layers:
        return best
    saved = [(sizes[0] - size) / layers for size in sizes]
    for away in range(layers + 1 if len(sizes) > len(TIERS) else 1):
        there = (away * saved[3], away * costs[3]) if away else (0.0, 0.0)
        for full in range(layers - away + 1):
            missing = sizes[0] - limit - full * saved[2] - there[0]
            selective = 0 if missing <= 0 else layers + 1 if saved[1] <= 0 else ceil(missing / saved[1] - 1e-9)
            if away + full + selective <= layers:
                seconds = full * costs[2] + selective * costs[1] + there[1]
                if seconds < best.seconds or (away, full, selective) == (0, 0, 0):
                    best = Counts(layers - full - selective, selective, full, seconds, away)
    return best


@dataclass(frozen=True, slots=True)
class Table:
    """Of a rank, by way (the tiers, then the host): bytes with all layers in it, seconds that one layer costs."""

    sizes: tuple[float, ...]
    costs: tuple[float, ...]

    def with_way(self, size: float, cost: float) -> Table:
        return Table((*self.sizes, size), (*self.costs, cost))


@dataclass(frozen=True)
class Tried:
    """What was measured to choose: the plan with every layer in the first tier (None: the strategy's own served),
    tables of the ranks that do not hold everything, and the plan that was chosen. Whoever chooses for the same strategy
    in another way need not measure these again."""

    freest: Measured | None
    tables: Mapping[int, Table]
    strategy: Strategy
    chosen: Measured

    def has(self, strategy: Strategy) -> bool:
        """Whether `chosen` is the plan of a strategy, whatever its reasons."""
        return replace(strategy, reasons=()) == replace(self.strategy, reasons=())


@dataclass(frozen=True)
class Tiered:
    """A strategy with a tier for each layer, its plan and what that holds, and the counts of every pipeline rank.
    `tried`: where not all hold everything, what was measured to choose."""

    strategy: Strategy
    plan: Plan
    ledger: MemoryLedger
    counts: tuple[Counts, ...]
    tried: Tried | None = None


def with_tiers(
    spec: Spec,
    strategy: Strategy,
    machine: Machine,
    limit: int,
    known: Measured | None = None,
    host: str = "",
    tried: Tried | None = None,
) -> Tiered:
    """The least that must be recomputed, layer by layer. Of a strategy that is not adaptive, one that has the same tier
    everywhere says so in one word. `known`: the strategy's own plan, where there is one. `host`: the kind of offload by
    which layers may be on the host in place of recompute; empty: none may. `tried`: of the same strategy."""
    word = "adaptive" if strategy.recompute == "adaptive" else "mixed"
    layers = sum(strategy.stages)
    freest = replace(strategy, recompute=word, tiers=("none",) * layers)
    own = known if known is not None and strategy.recompute == "none" else None
    first = own or (tried and tried.freest) or measured(spec, freest, machine, limit)
    roles = first.plan.roles
    if first.ledger.upper <= limit:
        whole = tuple(Counts(sum(map(len, role.layers)), 0, 0, 0.0) for role in roles)
        return Tiered(strategy if own else freest, first.plan, first.ledger, whole)
    tight = {role.pipeline for role in first.ledger.roles if role.upper > limit}  # the others keep everything
    given = {**({strategy.recompute: known} if known else {}), TIERS[0]: first}
    tables = table = tried.tables if tried else _tables(spec, freest, given, machine, limit, tight)
    if host:
        table = _with_host(spec, replace(freest, offload=host, offloaded=()), first.plan, tables, machine, limit)
    rooms, changed, found = dict.fromkeys(tight, float(limit)), tight, dict[int, Counts]()
    best: Measured | None = None
    for turn in range(ROUNDS + 1):
        found |= {rank: _of_rank(first.plan, rank, table[rank], rooms[rank]) for rank in changed}
        counts = tuple(found.get(r.pipeline) or Counts(sum(map(len, r.layers)), 0, 0, 0.0) for r in roles)
        tiers = _listed(first.plan, counts, layers)
        chosen = replace(strategy, recompute=word, tiers=tiers)
        if word == "mixed" and len(set(tiers)) == 1:
            chosen = replace(strategy, recompute=tiers[0], tiers=())
        away = _first(first.plan, counts)
        if away:
            chosen = replace(chosen, offload=host, offloaded=away)
        if tried and tried.has(chosen):
            best = tried.chosen
        elif best is None:
            best = measured(spec, chosen, machine, limit)
        else:  # tiers are each rank's own, so only those that get less room have another program
            best = best.with_ranks(measured(spec, chosen, machine, limit, changed), changed)
        over = {role.pipeline: role.upper - limit for role in best.ledger.roles if role.upper > limit}
        if all(rank not in found or found[rank].none - found[rank].away + found[rank].selective == 0 for rank in over):
            break
        rooms = {rank: room - over.get(rank, 0) if turn < ROUNDS - 1 else 0.0 for rank, room in rooms.items()}
        changed = tight.intersection(over)
    assert best is not None
    return Tiered(chosen, best.plan, best.ledger, counts, Tried(None if own else first, tables, chosen, best))


def _tables(
    spec: Spec, freest: Strategy, given: Mapping[str, Measured], machine: Machine, limit: int, ranks: set[int]
) -> dict[int, Table]:
    """What each tier holds and costs on the ranks that need one. `given`: plans with all layers in a tier."""
    found: dict[int, Table] = dict.fromkeys(ranks, Table((), ()))
    for tier in TIERS:
        uniform = replace(freest, tiers=(tier,) * sum(freest.stages))
        one = given.get(tier) or measured(spec, uniform, machine, limit, ranks)
        held = [role for role in one.ledger.roles if role.pipeline in ranks]
        plan = replace(one.plan, roles=tuple(role for role in one.plan.roles if role.pipeline in ranks))
        for role, seconds in zip(held, _rebuild_seconds(plan, machine), strict=True):
            found[role.pipeline] = found[role.pipeline].with_way(float(role.upper), seconds)
    return found


def _with_host(
    spec: Spec, away: Strategy, kept: Plan, tables: Mapping[int, Table], machine: Machine, limit: int
) -> dict[int, Table]:
    """The tables with what a rank holds with all its layers on the host, and the seconds of one layer there."""
    there = measured(spec, away, machine, limit)
    longer = max(simulate(there.plan, machine).seconds - simulate(kept, machine).seconds, 0.0)
    layers = max(sum(map(len, role.layers)) for role in there.plan.roles)
    one = longer / layers / away.micro_batches
    return {
        r.pipeline: tables[r.pipeline].with_way(float(r.upper), one) for r in there.ledger.roles if r.pipeline in tables
    }


def _of_rank(plan: Plan, rank: int, table: Table, room: float) -> Counts:
    role = next(role for role in plan.roles if role.pipeline == rank)
    return fewest(sum(map(len, role.layers)), table.sizes, table.costs, room)


def _first(plan: Plan, counts: Sequence[Counts]) -> tuple[int, ...]:
    """The layers that are on the host: the first of each rank, which wait longest for their backward."""
    chosen: set[int] = set()
    for role, found in zip(plan.roles, counts, strict=True):
        chosen.update(sorted(layer for chunk in role.layers for layer in chunk)[: found.away])
    return tuple(sorted(chosen))


def _listed(plan: Plan, counts: Sequence[Counts], layers: int) -> tuple[str, ...]:
    """The tier of every layer: after those on the host those that recompute come first on each rank."""
    tiers = ["none"] * layers
    for role, found in zip(plan.roles, counts, strict=True):
        held = sorted(layer for chunk in role.layers for layer in chunk)
        here = ("none",) * (found.none - found.away)
        words = ("none",) * found.away + ("full",) * found.full + ("selective",) * found.selective + here
        for layer, tier in zip(held, words, strict=True):
            tiers[layer] = tier
    return tuple(tiers)


def _rebuild_seconds(plan: Plan, machine: Machine) -> list[float]:
    """Per role, what one layer recomputes of a micro-batch, with the collectives of its rebuild."""
    prices, sizes = Prices(plan, machine), Sizes(plan)
    return [_of_role(role, prices, sizes) / max(sum(map(len, role.layers)), 1) for role in plan.roles]


def recomputing(plan: Plan, machine: Machine) -> float:
    """Seconds that the busiest rank recomputes in a step."""
    prices, sizes = Prices(plan, machine), Sizes(plan)
    most = max(_of_role(role, prices, sizes) for role in plan.roles)
    return most * int(plan.setting("train.micro_batches"))


def _of_role(role: Role, prices: Prices, sizes: Sizes) -> float:
    """Each chunk has a backward, whole or to inputs; a variant of it counts once."""
    found: dict[str, int] = {}
    for block in role.blocks:
        phase, _, rest = block.name.partition(".")
        if phase in ("B", "I") and "+" not in block.name:
            listed = ((i, n) for i, n in weighted(block.instructions) if sizes.runs(i))
            found[rest.partition(".")[0]] = sum(
                n * prices.price(role, i)
                for i, n in listed
                if (i.opcode == "recompute" or i.row.kind == "collective") and any(w[:2] == "r." for w in i.writes)
            )
    return sum(found.values()) * 1e-9


def sentence(counts: Sequence[Counts]) -> str:
    """The choice in words, rank by rank where they differ."""
    words = (*TIERS, "on the host")
    shown = [
        ", ".join(f"{n} {word}" for word, n in zip(words, (c.none - c.away, c.selective, c.full, c.away)) if n)
        or "no layer"
        for c in counts
    ]
    if len(set(shown)) == 1:
        where = shown[0] + (" on every stage" if len(shown) > 1 else "")
    else:
        where = "; ".join(f"stage {k}: {text}" for k, text in enumerate(shown))
    most = max(c.seconds for c in counts)
    what = "recomputing and copies" if any(c.away for c in counts) else "recomputing"
    return f"{where}: the least that fits, {most * 1e3:.3g} ms of {what} per micro-batch at most"
