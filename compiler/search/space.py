"""The space of legal strategies: every mesh that multiplies to the world size, with every other choice, as wished.

Some choices need no price to be ordered: ZeRO-1 never holds or moves more than ZeRO-0, and 1F1B takes as long as GPipe
and holds no more micro-batches. They are counted, and the better one stands for them wherever the wishes allow it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titan.compiler.spec.divisors import divisors
from titan.compiler.spec.legality import is_legal, legal
from titan.compiler.strategy import Strategy
from titan.grammar.diagnostics import Diagnostic

if TYPE_CHECKING:
    from titan.compiler.spec.schema import Spec

# values in order of preference: the first that the wishes allow stands for the others where they are never better
PREFERRED: dict[str, tuple[Any, ...]] = {
    "zero": (1, 0),
    "schedule": ("one_f_one_b", "gpipe"),
    "recompute": ("none", "full"),
    "sequence_parallel": (True, False),
    "context_form": ("gathered", "heads"),
}


@dataclass(frozen=True, slots=True)
class Space:
    """`candidates` are to be priced (recompute at its first allowed value), `size` counts every legal strategy,
    `broken` the meshes that each rule refused: (diagnostic of the first, number)."""

    candidates: tuple[Strategy, ...]
    size: int
    broken: tuple[tuple[Diagnostic, int], ...]


def allowed(spec: Spec, key: str, idle: bool = False) -> tuple[Any, ...]:
    """Values of a choice that the wishes allow, preferred first. An idle choice (nothing to shard) keeps one value: the
    plainest that is allowed."""
    wish = getattr(spec.parallel, key)
    values = tuple(v for v in PREFERRED[key] if wish.allows(v))
    if not idle or not values:
        return values
    plainest = {"zero": 0, "sequence_parallel": False}.get(key, values[0])
    return (plainest,) if plainest in values else values[:1]


def meshes(spec: Spec) -> list[tuple[int, int, int, int]]:
    """(pipeline, data, context, tensor) that multiply to the world size as wished, smallest tensor first."""
    p, world = spec.parallel, spec.cluster.world_size
    stages = p.stages.value
    pipelines = [d for d in divisors(world) if p.pipeline.allows(d) and (not stages or d == len(stages))]
    found = []
    for tensor in (d for d in divisors(world) if p.tensor.allows(d)):
        for context in (d for d in divisors(world // tensor) if p.context.allows(d)):
            for pipeline in pipelines:
                data, rest = divmod(world, tensor * context * pipeline)
                if not rest and p.data.allows(data):
                    found.append((pipeline, data, context, tensor))
    return found


def enumerate_space(spec: Spec) -> Space:
    """All candidates in a fixed order."""
    candidates: list[Strategy] = []
    first: dict[str, Diagnostic] = {}
    broken: Counter[str] = Counter()
    size = 0
    for mesh in meshes(spec):
        plain = _plain(spec, mesh)
        if not is_legal(spec, plain):
            for found in legal(spec, plain):
                first.setdefault(found.code, found)
                broken[found.code] += 1
            continue
        members, number = _of_mesh(spec, mesh)
        candidates += members
        size += number
    return Space(tuple(candidates), size, tuple((first[code], n) for code, n in broken.most_common()))


def _plain(spec: Spec, mesh: tuple[int, int, int, int]) -> Strategy:
    """The mesh alone, everything else as harmless as possible: what breaks here breaks for every choice."""
    pipeline, data, context, tensor = mesh
    stages = spec.parallel.stages.value or ()
    return Strategy(pipeline=pipeline, data=data, context=context, tensor=tensor, micro_batches=1, stages=stages)


def _of_mesh(spec: Spec, mesh: tuple[int, int, int, int]) -> tuple[list[Strategy], int]:
    """Candidates of one mesh, and how many strategies they stand for."""
    pipeline, data, context, tensor = mesh
    batch, stages = spec.train.global_batch // data, spec.parallel.stages.value or ()
    micro = [b for b in divisors(batch) if spec.parallel.micro_batch.allows(b)]
    zero = allowed(spec, "zero", idle=data * context == 1)
    schedule = allowed(spec, "schedule", idle=pipeline == 1)
    recompute = allowed(spec, "recompute")
    found: list[Strategy] = []
    for form in allowed(spec, "context_form", idle=context == 1):
        for parallel in allowed(spec, "sequence_parallel", idle=tensor == 1):
            some = Strategy(
                1, pipeline, data, context, tensor, parallel, form, zero[0], schedule[0], recompute[0], 1, batch, stages
            )
            if is_legal(spec, some):
                found += [
                    Strategy(
                        1, pipeline, data, context, tensor, parallel, form,
                        zero[0], schedule[0], recompute[0], b, batch // b, stages,
                    )
                    for b in micro
                ]  # fmt: skip
    return found, len(found) * len(zero) * len(schedule) * len(recompute)
