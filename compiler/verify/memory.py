"""Proof (g): what a role's buffers, registers and workspace need at their highest moment fits the plan's limit, and so
does what it keeps in host memory."""

from __future__ import annotations

from titan.compiler.plan.host import host_memory
from titan.compiler.plan.program import Plan
from titan.compiler.plan.sizes import Sizes, liveness
from titan.compiler.verify.findings import Finding, at


def memory(plan: Plan) -> list[Finding]:
    """Findings of proof (g): roles whose peak is above `memory.limit_bytes`, with the instruction of the peak."""
    found = []
    limit, sizes = plan.setting("memory.limit_bytes"), Sizes(plan)
    if limit is None:
        return [Finding("T770", "the plan states no memory limit")]
    for role, parts in zip(plan.roles, plan.memory, strict=True):
        total = sum(parts.values())
        if total > limit:
            walk = max((liveness(plan, role, name, sizes) for name, _ in role.orders), key=lambda w: w.peak)
            listed = ", ".join(f"{name} {size}" for name, size in parts.items())
            message = f"the role needs {total} bytes ({listed}), the limit is {limit}"
            call, index = walk.place
            if call < 0:
                found.append(Finding("T770", message, role.pipeline))
                continue
            order = next(n for n, _ in role.orders if liveness(plan, role, n, sizes).peak == walk.peak)
            block = role.block_table[role.order(order)[call].block]
            found.append(at("T770", message, role, block, index, call))
    return found + _on_host(plan, sizes)


def _on_host(plan: Plan, sizes: Sizes) -> list[Finding]:
    """Each rank has an equal share of its node's memory."""
    found, limit = [], int(plan.setting("memory.host_bytes") or 0)
    for role in plan.roles:
        parts = host_memory(role, sizes)
        total = sum(parts.values())
        if total > limit:
            listed = ", ".join(f"{name} {size}" for name, size in parts.items())
            message = f"the role needs {total} bytes of host memory ({listed}), a rank may take {limit}"
            found.append(Finding("T771", message, role.pipeline))
    return found
