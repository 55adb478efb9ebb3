"""All proofs of a plan, in order. They read only the plan."""

from __future__ import annotations

import time
from collections.abc import Callable

from titan.compiler.plan.program import Plan
from titan.compiler.verify.data import data
from titan.compiler.verify.declarations import declarations
from titan.compiler.verify.findings import MOST, Finding, Proof
from titan.compiler.verify.gradients import gradients
from titan.compiler.verify.layout import layout
from titan.compiler.verify.matching import matching
from titan.compiler.verify.memory import memory
from titan.compiler.verify.progress import progress
from titan.compiler.verify.registers import registers

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
            findings = _carried_out(prove, plan)
        found[name] = Proof(not findings, time.perf_counter() - start, tuple(findings[:MOST]))
        sound = sound and (name != "declarations" or not findings)
    return found


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
