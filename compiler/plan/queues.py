"""How many hardware queues a plan wants between a host and its CUDA device (`CUDA_DEVICE_MAX_CONNECTIONS`).

Kernels of streams that share a queue start in the order in which the host has issued them. With one queue a collective
of tensor ranks gets its multiprocessors before the products that are issued after it; but what runs ahead beside
compute, as gathers of sharded parameters do, then waits for products that it does not need.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.listing import distinct
from titan.compiler.plan.program import Plan

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
USUAL, MOST = 8, 32  # CUDA C++ Programming Guide, "CUDA Environment Variables": the default, and the most


@dataclass(frozen=True, slots=True)
class Queues:
    """The number of queues, and why."""

    number: int
    reason: str

    def against(self, given: str | None) -> str:
        """What is wrong with a number that the user has set; nothing where none is set or it does as well."""
        if given is None or given == str(self.number) or (self.number > 1 and given.isdigit() and int(given) > 1):
            return ""
        return f"{VARIABLE} = {given} is set and left alone, the plan wants {self.number}: {self.reason}"


def queues(plan: Plan) -> Queues:
    """One where tensor ranks alone communicate beside compute, else one for each stream, 8 at least."""
    ahead: dict[tuple[str, str], str] = {}
    near = False
    computing = (b for role in plan.roles for b in role.blocks if any(i.unit for i in distinct(b.instructions)))
    for block in computing:
        for instruction in (i for i in distinct(block.instructions) if i.row.asynchronous):
            if plan.group_size(instruction.group) > 1 and instruction.group.startswith("tensor"):
                near = True
            elif instruction.row.kind == "host" or plan.group_size(instruction.group) > 1:
                ahead.setdefault((instruction.group, str(instruction.stream)), instruction.opcode)
    if near and not ahead:
        return Queues(1, "sums over tensor ranks start before the products that are issued after them")
    named = ", ".join(sorted({f"{opcode} over {group or 'host'}" for (group, _), opcode in ahead.items()}))
    number = min(max(len(ahead) + 1 + near, USUAL), MOST)
    return Queues(
        number, f"{named} run beside compute and would wait for it in one queue" if named else "CUDA's default"
    )


def set_queues(plan: Plan, environment: MutableMapping[str, str]) -> str:
    """Sets the variable where it is not; else what is wrong with its value."""
    found = queues(plan)
    said = found.against(environment.get(VARIABLE))
    environment.setdefault(VARIABLE, str(found.number))
    return said
