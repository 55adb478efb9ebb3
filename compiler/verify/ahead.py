"""Steps ahead of their check: the further orders do what the exact one does, and what they change can come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from titan.compiler.plan.alike import Like
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.listing import distinct
from titan.compiler.plan.program import BEGUN, BlockCall, Bucket, Plan, Role, called
from titan.compiler.verify.findings import Finding, found_alike

ORDERS = ("body", "check", "update", "undo")
KEPT = 3  # parameters (or masters) and two moments


def ahead(plan: Plan) -> list[Finding]:
    """Nothing to prove for a plan that waits for its norms."""
    if not any(set(ORDERS) & {name for name, _ in role.orders} for role in plan.roles):
        return []
    return found_alike(plan, lambda likes: _roles(plan, likes))


def _roles(plan: Plan, likes: tuple[Like, ...]) -> list[Finding]:
    """Of roles that are alike and call the same blocks one is looked at."""
    known: set[tuple[object, ...]] = set()
    found: list[Finding] = []
    for like in likes:
        role, called = like.role, _called(like)
        if called not in known:
            known.add(called)
            found += (Finding("T745", message, role.pipeline) for message in _role(plan, role))
    return found


def _called(like: Like) -> tuple[object, ...]:
    """All that is looked at of the orders of a role, in blocks of the one that stands for it."""
    orders, blocks = dict(like.role.orders), {name: block.name for name, block in like.blocks.items()}
    train, body = orders["train"], orders.get("body", ())
    listed = (train[len(body) :], *(orders.get(name, ()) for name in ORDERS[1:]))
    turns = [tuple(blocks[call.block] for call in calls) for calls in listed]
    in_body = frozenset(map(blocks.__getitem__, set(like.role.called("body") if body else ())))
    return (like.first.pipeline, *orders, body == train[: len(body)], in_body, *turns)


def _role(plan: Plan, role: Role) -> list[str]:
    names = {name for name, _ in role.orders}
    there = names & set(ORDERS)
    if not there:
        return ["lacks steps ahead"]
    if there != set(ORDERS):
        return [f"steps ahead need the orders {', '.join(ORDERS)}, here are {', '.join(sorted(there))}"]
    found = _orders(role)
    update, undo = (_program(role, role.order(order)) for order in ("update", "undo"))
    kept = {b.name: b.elements for b in role.buffers}
    for bucket in (b for b in plan.buckets if role.pipeline in b.homes):
        elements = KEPT * bucket.local("o", plan.shard_degree(bucket))
        if kept.get(f"k.{bucket.name}") != elements:
            found.append(f"k.{bucket.name} must keep {elements} elements to take a step back")
        found += _bucket(update, bucket, "update", "ahead", (f"g.{bucket.name}",), "pok")
        found += _bucket(undo, bucket, "undo", "undo", (f"k.{bucket.name}",), "po")
    return found


def _orders(role: Role) -> list[str]:
    """The exact order is `body`, then `check` around the updates; what the next body adds to is left before it."""
    train, body, check = role.order("train"), role.order("body"), role.order("check")
    if body != train[: len(body)]:
        return ["`body` is not the exact step up to its norm"]
    if any(i.opcode == "optimizer_step" for i in _kinds(role, body)):
        return ["`body` contains a step of the optimizer"]
    looked = _program(role, check)
    counted = Counter(looked)
    tail = [i for i in _program(role, train[len(body) :]) if i in counted]
    wanted = {i.attribute("name") for i in looked if i.opcode == "report"} == {"grad_norm", "loss"}
    if not wanted or Counter(tail) != counted or not _same_order(tail, looked):
        return ["`check` is not what the exact step does for its norm and its loss"]
    if any(i.updates for i in _program(role, tuple(c for c in check if not c.block.endswith(BEGUN)))):
        return ["`check` still changes a buffer when the next `body` has begun"]
    return []


def _kinds(role: Role, calls: tuple[BlockCall, ...]) -> Iterator[Instruction]:
    """One instruction of each kind that the blocks have which are called, in whatever layer."""
    return (i for name in set(called(calls)) for i in distinct(role.block_table[name].instructions))


def _program(role: Role, calls: tuple[BlockCall, ...]) -> list[Instruction]:
    return [i for call in calls for i in role.block_table[call.block].instructions]


def _same_order(tail: list[Instruction], looked: list[Instruction]) -> bool:
    """Whether instructions with a common operand keep their order."""
    place = {i: n for n, i in enumerate(looked)}
    last: dict[str, int] = {}  # place of the last one that had an operand
    for i in tail:
        for name in {o.rstrip("?") for o in (*i.reads, *i.writes, *i.updates)}:
            if last.get(name, -1) >= place[i]:
                return False
            last[name] = place[i]
    return True


def _bucket(
    program: list[Instruction], bucket: Bucket, order: str, moment: str, reads: tuple[str, ...], kinds: str
) -> list[str]:
    """One step, then the gradients are cleared, then updated shards are gathered where the exact step does it."""
    name = bucket.name
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
