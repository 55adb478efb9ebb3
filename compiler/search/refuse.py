"""Refusals: no legal layout, or none that fits, each with what comes closest."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from titan.compiler.search.space import Space, meshes
from titan.compiler.spec.wishes import AUTO
from titan.compiler.strategy import Strategy
from titan.grammar.diagnostics import Diagnostic, Note, TitanError
from titan.grammar.quantities import format_quantity

if TYPE_CHECKING:
    from titan.compiler.spec.schema import Spec


# choice -> the value that needs the least memory; None: as large as the cluster
THRIFTY: dict[str, int | str | None] = {
    "recompute": "full",
    "zero": 3,
    "micro_batch": 1,
    "tensor": None,
    "pipeline": None,
    "expert": None,
}


def nothing_legal(spec: Spec, space: Space) -> TitanError:
    """T302: every mesh breaks a rule, or none satisfies the wishes at all."""
    world = spec.cluster.world_size
    wishes = ", ".join(f"{key} {wish}" for key, wish in spec.parallel.items() if wish.relation != "auto")
    span = next((wish.span for _, wish in spec.parallel.items() if wish.span is not None), None)
    if not meshes(spec):
        message = f"no mesh of {world} devices satisfies {wishes}"
        return TitanError(Diagnostic("T302", message, span))
    tried = len(meshes(spec))
    message = f"none of the {tried} meshes of {world} devices is legal" + (f" with {wishes}" if wishes else "")
    notes = tuple(Note(f"{number} of {tried}: {found.message}", found.span) for found, number in space.broken[:4])
    nearest = space.broken[0][0].nearest if space.broken else ()
    if not space.broken:
        notes = (Note("every mesh is legal by itself, but not with the other wishes"),)
    return TitanError(Diagnostic("T302", message, span, nearest=nearest, notes=notes))


def nothing_fits(spec: Spec, closest: Strategy, tried: int) -> TitanError:
    """T301 with the plan that comes closest and where its bytes are; exit code 3."""
    from titan.compiler.cost.memory import memory_ledger
    from titan.compiler.lower import lower

    limit = int(spec.cluster.device.memory * spec.objective.memory_fraction)
    if closest.recompute == "adaptive":  # nothing fits only if the lowest tiers do not
        closest = replace(closest, tiers=("full",) * sum(closest.stages))
    ledger = memory_ledger(lower(spec, closest), limit=limit)
    worst = ledger.worst
    parts = sorted(worst.components.items(), key=lambda part: -part[1])
    listed = ", ".join(f"{name} {_gib(size)}" for name, size in parts if size >= 2**20)
    notes = (
        Note(f"closest: {describe(closest)}"),
        Note(f"pipeline rank {worst.pipeline} holds {listed}"),
        *([Note(f"host memory: {_gib(ledger.host)} of {_gib(ledger.host_limit)} per device")] if ledger.host else ()),
        *_hints(spec, closest, dict(worst.components), limit),
    )
    message = (
        f"none of {tried} layouts fits: the closest needs {_gib(worst.point)} per device, the limit is {_gib(limit)}"
        f" ({spec.objective.memory_fraction:.0%} of {format_quantity(spec.cluster.device.memory, 'bytes')})"
    )
    return TitanError(Diagnostic("T301", message, spec.span("cluster"), notes=notes), exit_code=3)


def _hints(spec: Spec, closest: Strategy, parts: dict[str, int], limit: int) -> tuple[Note, ...]:
    """What does not help, what stands in the way, and what would fit instead."""
    found = []
    state = parts["parameters"] + parts["gradients"] + parts["optimizer"]
    held = [key for key in THRIFTY if _held(spec, key)]
    room = limit - parts["reserved"]
    if room <= 0:
        taken = _gib(parts["reserved"])
        found.append(Note(f"driver, context and libraries take {taken} of each device: more of them do not help"))
    elif state > limit:
        text = f"parameters, gradients and optimizer state alone take {_gib(state)}: a shorter sequence does not help"
        found.append(Note(text))
        if not held:
            needed = -(-spec.cluster.nodes * state // room)
            found.append(Note(f"sharded over more devices they would fit on about {needed} nodes"))
    if _whole_experts(spec, closest):
        text = "optimizer state of the experts is not sharded: each expert lies on one rank of data x context"
        more = spec.cluster.world_size * 2
        found.append(Note(f"{text}, so only more of these would share it, as on {more:,} devices"))
    if held:
        found.append(Note("wishes that hold memory up: " + ", ".join(f"{k} {getattr(spec.parallel, k)}" for k in held)))
        found += _instead(spec, held)
    return tuple(found)


def _whole_experts(spec: Spec, s: Strategy) -> bool:
    data, context, _ = s.expert_parts
    return bool(spec.model.experts) and s.expert > 1 and data * context == s.data * s.context


def _instead(spec: Spec, held: list[str]) -> list[Note]:
    """The fastest layout that fits, by estimate, when one of the wishes is let go, else when all are."""
    from titan.compiler.search.search import fitting_by_estimate

    for keys in (*((key,) for key in held), tuple(held)):
        free = replace(spec, parallel=replace(spec.parallel, **dict.fromkeys(keys, AUTO)))
        fitting = fitting_by_estimate(free)
        if fitting:
            strategy = fitting[0].strategy
            return [Note("this would fit: " + ", ".join(f"{key} = {getattr(strategy, key)}" for key in keys))]
    return []


def _held(spec: Spec, key: str) -> bool:
    """Does the user's wish forbid the value that needs the least memory?"""
    wish = getattr(spec.parallel, key)
    if wish.relation == "auto":
        return False
    least = THRIFTY[key]
    return not wish.allows(spec.cluster.world_size if least is None else least)


def describe(s: Strategy) -> str:
    """One line: degrees and the choices that matter."""
    degrees = " ".join(f"{axis}={getattr(s, axis)}" for axis in ("pipeline", "data", "context", "tensor"))
    extra = [f"micro_batch={s.micro_batch}", *_sharding(s), f"recompute={s.recompute}"]
    extra += [f"offload={s.offload}"] if s.offload != "none" else []
    if s.pipeline > 1:
        extra.append(f"schedule={s.schedule}")
    if s.context > 1:
        extra.append(f"context_form={s.context_form}")
        extra += [f"context_heads={s.context_heads}"] if s.context_heads > 1 else []
    if s.tensor > 1:
        extra.append(f"sequence_parallel={str(s.sequence_parallel).lower()}")
    return f"{degrees} {' '.join(extra)}"


def _sharding(s: Strategy) -> list[str]:
    found = [f"zero={s.zero}"]
    if s.zero == 3:
        found += [f"gather={s.gather}", f"reduce={s.reduce}"]
    return found + ([f"shard={s.shard}"] if s.shard else [])


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
