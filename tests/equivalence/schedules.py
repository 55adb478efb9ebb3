"""A pipeline schedule against one process: uneven stages, tied embeddings, any ranks and micro-batches."""

from __future__ import annotations

from titan.compiler.schedules.registry import SCHEDULES
from titan.compiler.strategy import Strategy

from tests.compiler.schedules.small import small_spec
from tests.equivalence.comparison import differences, plans, train_plan, train_reference


def fewest(name: str, ranks: int, at_least: int = 1) -> int | None:
    """The smallest legal number of micro-batches from `at_least` on; None when there is none for these ranks."""
    return next((m for m in range(at_least, 4 * ranks + at_least + 2) if SCHEDULES[name].legal(ranks, m)), None)


def uneven_stages(name: str, ranks: int) -> tuple[int, ...]:
    """One layer per chunk and one more on a middle chunk."""
    number = ranks * (2 if name == "solved" else SCHEDULES[name].chunks)
    return tuple(2 if c == number // 2 else 1 for c in range(number))


def mismatches(
    name: str, ranks: int, micro_batches: int, *, tied: bool = True, zero: int = 0, steps: int = 2
) -> list[str]:
    """What differs from plain autograd by more than 1e-9 in loss, gradients, norm or updated parameters."""
    stages = uneven_stages(name, ranks)
    spec = small_spec(sum(stages), micro_batches, ranks, tied=tied, dropout=0.1)
    strategy = Strategy(pipeline=ranks, micro_batches=micro_batches, schedule=name, stages=stages, zero=zero)
    plan, single = plans(spec, strategy)
    one = train_plan(single, spec, steps=1)
    return differences(train_plan(plan, spec, steps), train_reference(single, spec, one.initial, steps))
