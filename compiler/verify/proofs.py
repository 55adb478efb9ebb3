"""All proofs of a plan, in order. They read only the plan."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from titan.compiler.garbage import rare_collections
from titan.compiler.plan.program import Plan
from titan.compiler.plan.segment import TIERS
from titan.compiler.plan.tiers import at_start, at_tiers
from titan.compiler.shared_work import SharedWork
from titan.compiler.verify.data import data
from titan.compiler.verify.declarations import declarations
from titan.compiler.verify.fewer import fewer
from titan.compiler.verify.findings import MOST, Finding, Proof
from titan.compiler.verify.gradients import gradients
from titan.compiler.verify.layout import layout
from titan.compiler.verify.matching import matching
from titan.compiler.verify.memory import memory
from titan.compiler.verify.progress import progress
from titan.compiler.verify.registers import registers
from titan.compiler.verify.tiers import tiers

__all__ = ["PROOFS", "Finding", "Proof", "Proving", "verify"]

# declarations first: the others look names up without asking
PROOFS: tuple[tuple[str, Callable[[Plan], list[Finding]]], ...] = (
    ("declarations", declarations),
    ("registers", registers),
    ("matching", matching),
    ("progress", progress),
    ("gradients", gradients),
    ("data", data),
    ("layout", layout),
    ("memory", memory),
    ("tiers", tiers),
)

LARGE = 5_000  # instructions in blocks from which on two processes share the proofs
LONGEST = ("registers", "memory", "progress", "gradients", "layout", "matching")  # begun first, so that none is last


class Proving:
    """The proofs of a plan, begun in a second process at once where that pays. Where layers are alike those that stand
    for all of them are proven; memory is that of the whole plan. `measured`: this process will have measured that."""

    def __init__(self, plan: Plan, measured: bool = False) -> None:
        self.plan = plan
        self._less = fewer(plan)
        own = ("memory",) if measured and not plan.adaptive else ()
        self._work = SharedWork(_jobs(plan, self._less or plan), _sound, pays=_large(plan), own=own)

    @rare_collections()
    def proofs(self) -> dict[str, Proof]:
        """Every proof by name."""
        found = _in_their_order(self._work.finish())
        if self._less is None or all(proof.ok for proof in found.values()):
            return found
        return _in_their_order(SharedWork(_jobs(self.plan, self.plan), _sound, pays=_large(self.plan)).finish())

    def stop(self) -> None:
        """Leaves the proofs undone."""
        self._work.stop()


def verify(plan: Plan) -> dict[str, Proof]:
    """Every proof by name. A proof that cannot be carried out on a broken plan fails with a finding that says so."""
    return Proving(plan).proofs()


def _jobs(plan: Plan, less: Plan) -> dict[str, Callable[[], Proof]]:
    """The proofs in the order in which they are begun, of the smaller plan where that will do."""
    (first, *rest) = (name for name, _ in PROOFS)
    ranked = (first, *LONGEST, *(name for name in rest if name not in LONGEST))
    return {name: partial(_prove, name, plan if name == "memory" else less) for name in ranked}


def _sound(declarations: Proof) -> bool:
    return declarations.ok


def _in_their_order(found: dict[str, Proof]) -> dict[str, Proof]:
    why = Finding("T700", "not tried: the plan names things that are not declared")
    return {name: found.get(name) or Proof(False, 0.0, (why,)) for name, _ in PROOFS}


def _prove(name: str, plan: Plan) -> Proof:
    start = time.perf_counter()
    findings = _in_all_tiers(name, dict(PROOFS)[name], plan)
    return Proof(not findings, time.perf_counter() - start, tuple(findings[:MOST]))


def _large(plan: Plan) -> bool:
    return sum(len(block.instructions) for role in plan.roles for block in role.blocks) > LARGE


def _in_all_tiers(name: str, prove: Callable[[Plan], list[Finding]], plan: Plan) -> list[Finding]:
    """A proof of a plan that leaves recompute tiers to the run is carried out in each tier; that of memory in those
    that the plan begins with and in the lowest, to which the run can always go down."""
    if name == "tiers" or not plan.adaptive:
        return _carried_out(prove, plan)
    plans = {tier: at_tiers(plan, lambda layer, tier=tier: tier) for tier in TIERS}  # type: ignore[misc]
    if name == "memory":
        plans = {"begin": at_start(plan), TIERS[-1]: plans[TIERS[-1]]}
    return [
        replace(finding, message=f"{finding.message} (tier {tier})")
        for tier, chosen in plans.items()
        for finding in _carried_out(prove, chosen)
    ]


def _carried_out(prove: Callable[[Plan], list[Finding]], plan: Plan) -> list[Finding]:
    try:
        return prove(plan)
    except (
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
        AssertionError,
        ArithmeticError,
        RecursionError,
    ) as problem:
        return [Finding("T700", f"the proof cannot be carried out on this plan: {type(problem).__name__} {problem}")]
