"""Peak memory of every role: what the plan holds, and what lies outside its tensors.

The plan's part is exact (buffers, and the walk of live registers with the workspace of the running instruction).
Outside it: device context and libraries, buffers of communicators, and what the allocator loses to rounding.
Under-predicting is the worse error, so there is a point, an upper bound and a verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

from titan.compiler.cost.machine import Machine, read_machine
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.host import host_memory
from titan.compiler.plan.listing import distinct
from titan.compiler.plan.opcodes import ASYNCHRONOUS
from titan.compiler.plan.program import Plan, Role
from titan.compiler.plan.sizes import Sizes

_Kind = tuple[str, str, str, tuple[tuple[str, object], ...]]
_KIND = attrgetter("opcode", "group", "stream", "attributes")


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """Bytes of one role by component (their sum is `point`) and the upper bound; `host`: what it keeps in host
    memory."""

    pipeline: int
    components: Mapping[str, int]
    upper: int
    host: Mapping[str, int]

    @property
    def point(self) -> int:
        return sum(self.components.values())


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """All roles against the limit of a device, and of its share of host memory."""

    roles: tuple[RoleMemory, ...]
    limit: int
    host_limit: int = 0

    @property
    def peak(self) -> int:
        return max(role.point for role in self.roles)

    @property
    def upper(self) -> int:
        return max(role.upper for role in self.roles)

    @property
    def worst(self) -> RoleMemory:
        return max(self.roles, key=lambda role: (role.point, -role.pipeline))

    @property
    def host(self) -> int:
        """Bytes of host memory of the role that needs most."""
        return max(sum(role.host.values()) for role in self.roles)

    @property
    def verdict(self) -> str:
        if self.host > self.host_limit:
            return "does not fit"
        return verdict(self.peak, self.upper, self.limit)


def verdict(point: int, upper: int, limit: int) -> str:
    """`fits` when even the upper bound does, `at risk` when only the point does, else `does not fit`."""
    if point > limit:
        return "does not fit"
    return "fits" if upper <= limit else "at risk"


def memory_ledger(plan: Plan, machine: Machine | None = None, limit: int | None = None) -> MemoryLedger:
    """Ledger of a plan; `limit` in bytes defaults to the plan's setting, else to the device's memory."""
    machine = machine or read_machine(plan.setting("cluster"))
    sizes = Sizes(plan)
    if limit is None:
        limit = int(plan.setting("memory.limit_bytes") or machine.memory)
    roles = tuple(_role_memory(role, held, machine, sizes) for role, held in zip(plan.roles, plan.memory, strict=True))
    return MemoryLedger(roles, limit, int(plan.setting("memory.host_bytes") or 0))


def _role_memory(role: Role, held: dict[str, int], machine: Machine, sizes: Sizes) -> RoleMemory:
    tensors = sum(held.values())
    communicators = round(communicator_count(sizes.plan, role, sizes) * machine.figures["communicator_bytes"])
    slack = round(tensors * machine.figures["allocator_slack"])
    components = {**held, "communicators": communicators, "allocator": slack, "reserved": machine.reserved}
    upper = upper_bound(machine, tensors, communicators)
    return RoleMemory(role.pipeline, components, upper, host_memory(role, sizes))


def upper_bound(machine: Machine, tensors: int, communicators: int) -> int:
    """Tensors with the upper figure of the allocator's loss, communicators half as large again, and the context."""
    slack = 1.0 + machine.figures["allocator_slack_upper"]
    return round(tensors * slack + 1.5 * communicators) + machine.reserved


def communicator_count(plan: Plan, role: Role, sizes: Sizes | None = None) -> int:
    """Communicators of a rank: one per group and stream, and one per channel to a peer."""
    return (sizes or Sizes(plan)).once(role, _communicators)


def _communicators(role: Role, sizes: Sizes) -> int:
    kinds = set[_Kind]().union(*[map(_KIND, distinct(block.instructions)) for block in role.blocks])
    issued = [kind for kind in kinds if kind[0] in ASYNCHRONOUS and kind[2]]
    channels = {(group, stream, dict(attributes).get("peer", 0)) for _, group, stream, attributes in issued}
    return sum(sizes.plan.group_size(group) > 1 for group, _, _ in channels)
