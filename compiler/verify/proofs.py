"""All proofs of a plan, in order. They read only the plan."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from titan.compiler.plan.program import Plan
from titan.compiler.plan.segment import TIERS
from titan.compiler.plan.tiers import at_start, at_tiers, is_adaptive
from titan.compiler.verify.data import data
from titan.compiler.verify.declarations import declarations
from titan.compiler.verify.findings import MOST, Finding, Proof
from titan.compiler.verify.gradients import gradients
from titan.compiler.verify.layout import layout
from titan.compiler.verify.matching import matching
from titan.compiler.verify.memory import memory
from titan.compiler.verify.progress import progress
from titan.compiler.verify.registers import registers
from titan.compiler.verify.tiers import tiers

__all__ = ["PROOFS", "Finding", "Proof", "verify"]

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


def verify(plan: Plan) -> dict[str, Proof]:
    """Every proof by name. A proof that cannot be carried out on a broken plan fails with a finding that says so."""
    found: dict[str, Proof] = {}
    sound = True
    for name, prove in PROOFS:
        start = time.perf_counter()
        if not sound:
            findings = [Finding("T700", "not tried: the plan names things that are not declared")]
        else:
            findings = _in_all_tiers(name, prove, plan)
        found[name] = Proof(not findings, time.perf_counter() - start, tuple(findings[:MOST]))
        sound = sound and (name != "declarations" or not findings)
    return found


def _in_all_tiers(name: str, prove: Callable[[Plan], list[Finding]], plan: Plan) -> list[Finding]:
    """A proof of a plan that leaves recompute tiers to the run is carried out in each tier; that of memory in those
    that the plan begins with and in the lowest, to which the run can always go down."""
    if name == "tiers" or not is_adaptive(plan):
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
