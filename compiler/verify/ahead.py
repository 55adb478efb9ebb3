"""Steps ahead of their check: the further orders do what the exact one does, and what they change can come back."""

from __future__ import annotations

from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.program import Bucket, Plan, Role
from titan.compiler.verify.findings import Finding

ORDERS = ("body", "check", "update", "undo")
KEPT = 3  # parameters (or masters) and two moments


def ahead(plan: Plan) -> list[Finding]:
    """Nothing to prove for a plan that waits for its norms."""
    return [Finding("T745", message, role.pipeline) for role in plan.roles for message in _role(plan, role)]


def _role(plan: Plan, role: Role) -> list[str]:
    names = {name for name, _ in role.orders}
    there = names & set(ORDERS)
    if not there:
        return [] if not any(set(ORDERS) & {n for n, _ in r.orders} for r in plan.roles) else ["lacks steps ahead"]
    if there != set(ORDERS):
        return [f"steps ahead need the orders {', '.join(ORDERS)}, here are {', '.join(sorted(there))}"]
    found = _orders(role)
    kept = {b.name: b.elements for b in role.buffers}
    for bucket in (b for b in plan.buckets if role.pipeline in b.homes):
        elements = KEPT * bucket.local("o", plan.shard_degree(bucket))
        if kept.get(f"k.{bucket.name}") != elements:
            found.append(f"k.{bucket.name} must keep {elements} elements to take a step back")
        found += _bucket(role, bucket, "update", "ahead", (f"g.{bucket.name}",), "pok")
        found += _bucket(role, bucket, "undo", "undo", (f"k.{bucket.name}",), "po")
    return found


def _orders(role: Role) -> list[str]:
    """The exact order is `body` without its end, then `check`, the updates, and the end."""
    train, body, check = role.order("train"), role.order("body"), role.order("check")
    first = len(body) - 1
    after = train[first : first + 1]
    if body[:-1] != train[:first] or body[-1:] != train[-1:] or after != check[:1]:
        return ["`body` and `check` are not the exact step up to its norm"]
    tail = [i for call in train[first:-1] for i in role.block_table[call.block].instructions]
    before = [i for call in train[:first] for i in role.block_table[call.block].instructions]
    if any(i.opcode == "optimizer_step" for i in before):
        return ["`body` contains a step of the optimizer"]
    looked = [i for call in check for i in role.block_table[call.block].instructions]
    if [i for i in tail if i in looked] != looked:
        return ["`check` is not what the exact step does for its norm"]
    return []


def _bucket(role: Role, bucket: Bucket, order: str, moment: str, reads: tuple[str, ...], kinds: str) -> list[str]:
    """One step, then the gradients are cleared, then updated shards are gathered where the exact step does it."""
    name = bucket.name
    program = [i for call in role.order(order) for i in role.block_table[call.block].instructions]
    mine = [i for i in program if any(u.partition(".")[2] == name for u in i.updates)]
    steps = [i for i in mine if i.opcode == "optimizer_step"]
    wanted = tuple(f"{kind}.{name}" for kind in kinds)
    right = len(steps) == 1 and steps[0].attribute("moment") == moment
    if not right or steps[0].reads != reads or steps[0].updates != wanted:
        return [f"`{order}` must step bucket {name} once: {' '.join(wanted)} from {' '.join(reads)}"]
    cleared = [i for i in mine if i.opcode == "zero_grad" and i.updates == (f"g.{name}",)]
    if len(cleared) != 1 or mine.index(cleared[0]) < mine.index(steps[0]):
        return [f"`{order}` must clear g.{name} once, after its step"]
    return (
        [] if _gathers(mine, steps[0]) == _due(bucket) else [f"`{order}` must gather p.{name} as the exact step does"]
    )


def _gathers(mine: list[Instruction], step: Instruction) -> list[str]:
    after = mine[mine.index(step) :]
    return [i.group for i in after if i.opcode == "unshard"]


def _due(bucket: Bucket) -> list[str]:
    return [bucket.shards] if bucket.sharded and "p" not in bucket.sharded else []
