"""All proofs of a plan, in order. They read only the plan."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from titan.compiler.garbage import rare_collections
from titan.compiler.plan.program import Plan
from titan.compiler.plan.segment import TIERS
from titan.compiler.plan.tiers import at_start, at_tiers
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

LARGE = 5_000  # instructions in blocks from which on two processes share the proofs
APART = ("matching", "gradients", "data", "memory")  # about half of the work


@rare_collections()
def verify(plan: Plan) -> dict[str, Proof]:
    """Every proof by name. A proof that cannot be carried out on a broken plan fails with a finding that says so. Where
    layers are alike those that stand for all of them are proven; memory is that of the whole plan."""
    names = tuple(name for name, _ in PROOFS)
    less = fewer(plan)
    if less is not None:
        found = _all(less, tuple(name for name in names if name != "memory")) | _prove(plan, ("memory",))
        if all(proof.ok for proof in found.values()):
            return {name: found[name] for name in names}
    return _all(plan, names)


def _all(plan: Plan, names: Sequence[str]) -> dict[str, Proof]:
    first = _prove(plan, ("declarations",))
    rest = tuple(name for name in names if name != "declarations")
    if not first["declarations"].ok:
        why = Finding("T700", "not tried: the plan names things that are not declared")
        return first | {name: Proof(False, 0.0, (why,)) for name in rest}
    found = first | (_in_two_processes(plan, rest) if _shareable(plan) else _prove(plan, rest))
    return {name: found[name] for name in names}


def _prove(plan: Plan, names: Sequence[str]) -> dict[str, Proof]:
    found: dict[str, Proof] = {}
    for name, prove in PROOFS:
        if name in names:
            start = time.perf_counter()
            findings = _in_all_tiers(name, prove, plan)
            found[name] = Proof(not findings, time.perf_counter() - start, tuple(findings[:MOST]))
    return found


def _shareable(plan: Plan) -> bool:
    """Whether a second process pays: a large plan, a second core, and no threads that a fork would leave behind."""
    size = sum(len(block.instructions) for role in plan.roles for block in role.blocks)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return size > LARGE and cores > 1 and "torch" not in sys.modules and threading.active_count() == 1


def _in_two_processes(plan: Plan, names: Sequence[str]) -> dict[str, Proof]:
    """Half of the proofs in a forked process, which has the plan already."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    theirs = [name for name in names if name in APART]
    helper = context.Process(target=lambda: there.send(_prove(plan, theirs)), daemon=True)
    helper.start()
    there.close()
    found = _prove(plan, [name for name in names if name not in theirs])
    try:
        found |= here.recv()
    except EOFError:  # it was killed: its share is done here
        found |= _prove(plan, theirs)
    helper.join()
    return found


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
