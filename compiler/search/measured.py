"""Compiled plans with what they hold; of a plan that differs from another one on some pipeline ranks, only those."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from titan.compiler.cost.memory import MemoryLedger, memory_ledger
from titan.compiler.plan.frozen import dataclass

if TYPE_CHECKING:
    from titan.compiler.cost.machine import Machine
    from titan.compiler.plan.program import Plan
    from titan.compiler.spec.schema import Spec
    from titan.compiler.strategy import Strategy


@dataclass(frozen=True)
class Measured:
    """A plan and its ledger. `limit` in bytes is the ledger's."""

    plan: Plan
    ledger: MemoryLedger

    def with_ranks(self, other: Measured, ranks: Collection[int]) -> Measured:
        """The other plan, with the programs of these pipeline ranks from there and all others from here."""
        roles = {role.pipeline: role for role in other.plan.roles if role.pipeline in ranks}
        memory = {role.pipeline: role for role in other.ledger.roles if role.pipeline in ranks}
        plan = replace(other.plan, roles=tuple(roles.get(r.pipeline, r) for r in self.plan.roles))
        held = tuple(memory.get(r.pipeline, r) for r in self.ledger.roles)
        return Measured(plan, replace(other.ledger, roles=held))


def ignored(plan: Plan) -> None:
    """Who is told of a plan, and has no use for it."""


def measured(
    spec: Spec,
    strategy: Strategy,
    machine: Machine,
    limit: int,
    ranks: Collection[int] | None = None,
    lowered: Callable[[Plan], None] = ignored,
) -> Measured:
    """The plan of a strategy, or the part of it that these pipeline ranks run, and what it holds. `lowered` is told of
    the plan before it is measured."""
    from titan.compiler.lower import lower

    plan = lower(spec, strategy, ranks)
    lowered(plan)
    return Measured(plan, memory_ledger(plan, machine, limit))
