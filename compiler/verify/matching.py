"""Proof (b): members of a group issue the same collectives in the same order; every send meets its receive.

Rank symmetry. All ranks of a role run one program, and peers and groups are named relative to the mesh. So a group
whose members share a pipeline coordinate agrees with itself by construction; only groups that join several programs and
the transfers can disagree, and they do so for all ranks alike. Verifying roles verifies all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from titan.compiler.plan.instruction import Instruction, type_name
from titan.compiler.plan.opcodes import OPCODES
from titan.compiler.plan.operators import TensorType
from titan.compiler.plan.program import Block, Plan, Role
from titan.compiler.verify.findings import MOST, Finding, at, crosses_programs
from titan.compiler.verify.rings import in_ring, ring_matching

_COLLECTIVE = frozenset(n for n, row in OPCODES.items() if row.kind == "collective") | {"unshard", "reduce_grad"}
_TRANSFER = frozenset(n for n, row in OPCODES.items() if row.kind == "transfer")
Place = tuple[Role, Block, int, int]  # role, block, index, call


@dataclass(frozen=True)
class _Event:
    """A collective across programs, or one end of a transfer, as it stands in a block."""

    index: int
    instruction: Instruction
    group: str
    signature: tuple[object, ...]
    symbol: str

    @property
    def of_bucket(self) -> bool:
        """Copies of the model meet over their parameters and gradients, each in a micro-batch of its own."""
        return self.instruction.opcode in ("unshard", "reduce_grad")


def _size(plan: Plan, instruction: Instruction) -> tuple[object, ...]:
    """What members must agree on beside opcode and attributes: the tensor's type, or the bucket's length and dtype."""
    if instruction.opcode in ("unshard", "reduce_grad"):
        bucket = plan.bucket_of((*instruction.updates, *instruction.reads)[0])
        return ("bucket", bucket.name, bucket.elements, bucket.dtype)
    tensor: TensorType = plan.types[type_name(instruction.writes[0])]
    return (tensor.dtype, tensor.shape)


def _events(plan: Plan, role: Role) -> tuple[dict[str, list[_Event]], list[Finding]]:
    """Per block, what other programs must match."""
    found: dict[str, list[_Event]] = {}
    wrong: list[Finding] = []
    members = {g: crosses_programs(plan, g) for g in {i.group for b in role.blocks for i in b.instructions if i.group}}
    for block in role.blocks:
        events = []
        for index, instruction in enumerate(block.instructions):
            if instruction.opcode in _COLLECTIVE and members[instruction.group]:
                if role.pipeline not in members[instruction.group]:
                    message = f"the ranks of this role are no members of group `{instruction.group}`"
                    wrong.append(at("T721", message, role, block, index))
                signature = (instruction.opcode, _size(plan, instruction), instruction.attributes, instruction.stream)
                events.append(_Event(index, instruction, instruction.group, signature, _symbol(instruction.writes[0])))
            elif instruction.opcode in _TRANSFER and not in_ring(instruction):
                if plan.mesh.resolve(instruction.group) != ("pipeline",):
                    wrong.append(at("T722", "transfers run along the pipeline axis", role, block, index))
                    continue
                peer = role.pipeline + int(instruction.attribute("peer"))
                if peer == role.pipeline or not 0 <= peer < len(plan.roles):
                    wrong.append(at("T722", f"there is no stage {peer} to exchange with", role, block, index))
                name = instruction.reads[0] if instruction.opcode == "send" else instruction.writes[0]
                base, _, symbol = name.rstrip("?").partition(":")
                channel = f"{min(peer, role.pipeline)}-{max(peer, role.pipeline)}"
                events.append(_Event(index, instruction, channel, (base, peer), symbol))
        if events:
            found[block.name] = events
    return found, wrong + list(ring_matching(plan, role))


def _symbol(name: str) -> str:
    return name.rstrip("?").partition(":")[2]


def _unroll(role: Role, order: str, events: dict[str, list[_Event]]) -> list[tuple[_Event, int, Place]]:
    """Events in program order with their micro-batch (-1: none)."""
    found = []
    for position, call in enumerate(role.order(order)):
        listed = events.get(call.block)
        if not listed:
            continue
        block = role.block_table[call.block]
        arguments = dict(zip(block.parameters, call.arguments, strict=True))
        for event in listed:
            found.append((event, arguments.get(event.symbol, -1), (role, block, event.index, position)))
    return found


Unrolled = dict[int, list[tuple[_Event, int, Place]]]


def _finding(code: str, message: str, place: Place) -> Finding:
    return at(code, message, *place)


def _collectives(plan: Plan, unrolled: Unrolled) -> list[Finding]:
    """For each group across programs: all members' lists are equal, item by item."""
    found: list[Finding] = []
    lists: dict[str, dict[int, list[tuple[_Event, int, Place]]]] = {}
    for stage, events in unrolled.items():
        for item in events:
            if item[0].instruction.opcode in _COLLECTIVE:
                lists.setdefault(item[0].group, {}).setdefault(stage, []).append(item)
    for group, by_stage in lists.items():
        members = crosses_programs(plan, group)
        first = members[0]
        for stage in members[1:]:
            found += _compare(group, by_stage.get(first, []), by_stage.get(stage, []), first, stage)
    return found


def _compare(
    group: str, mine: list[tuple[_Event, int, Place]], other: list[tuple[_Event, int, Place]], first: int, stage: int
) -> list[Finding]:
    for (a, i, _), (b, j, place) in zip(mine, other, strict=False):
        if a.signature != b.signature or (i != j and not a.of_bucket):
            message = f"members of `{group}` disagree: stage {first} issues {_brief(a)}, stage {stage} {_brief(b)}"
            return [_finding("T720", message, place)]
    if len(mine) != len(other):
        longer, count = (mine, len(other)) if len(mine) > len(other) else (other, len(mine))
        message = (
            f"members of `{group}` disagree: stage {first} issues {len(mine)} collectives, stage {stage} {len(other)}"
        )
        return [_finding("T720", message, longer[count][2])]
    return []


def _brief(event: _Event) -> str:
    attributes = " ".join(f"{k}={v}" for k, v in event.instruction.attributes)
    return f"{event.instruction.opcode} {event.signature[1]} {attributes}".strip()


def _order(unrolled: Unrolled) -> list[Finding]:
    """One global order of all groups: the programs' issue orders, joined at shared collectives, have no cycle."""
    after: dict[tuple[str, int], set[tuple[str, int]]] = {}
    places: dict[tuple[str, int], Place] = {}
    for events in unrolled.values():
        counts: dict[str, int] = {}
        before: tuple[str, int] | None = None
        for event, _, place in events:
            if event.instruction.opcode not in _COLLECTIVE:
                continue
            node = (event.group, counts.get(event.group, 0))
            counts[event.group] = node[1] + 1
            places[node] = place
            after.setdefault(node, set())
            if before is not None:
                after[before].add(node)
            before = node
    stuck = _cycle(after)
    if not stuck:
        return []
    groups = ", ".join(sorted({group for group, _ in stuck}))
    message = f"no one order of the groups {groups} holds on all ranks: two ranks acquire them in opposite orders"
    return [_finding("T723", message, places[min(stuck)])]


def _cycle(after: dict[tuple[str, int], set[tuple[str, int]]]) -> set[tuple[str, int]]:
    """Nodes that cannot be sorted topologically."""
    missing = dict.fromkeys(after, 0)
    for targets in after.values():
        for target in targets:
            missing[target] += 1
    ready = [node for node, count in missing.items() if not count]
    while ready:
        node = ready.pop()
        del missing[node]
        for target in after[node]:
            missing[target] -= 1
            if not missing[target]:
                ready.append(target)
    return set(missing)


def _transfers(plan: Plan, unrolled: Unrolled) -> list[Finding]:
    """Channel by channel (sender, receiver, stream), in order: the same register of the same micro-batch, one type."""
    sides: dict[tuple[int, int, str], tuple[list[tuple[str, int, Place]], list[tuple[str, int, Place]]]] = {}
    for stage, events in unrolled.items():
        for event, batch, place in events:
            opcode = event.instruction.opcode
            if opcode not in _TRANSFER:
                continue
            base, peer = event.signature
            ends = (stage, peer) if opcode == "send" else (peer, stage)
            channel = sides.setdefault((*ends, event.instruction.stream), ([], []))
            channel[opcode == "recv"].append((str(base), batch, place))
    found: list[Finding] = []
    for (sender, receiver, stream), (sent, received) in sides.items():
        where = f"channel {sender} -> {receiver} {stream}"
        for (a, i, _), (b, j, place) in zip(sent, received, strict=False):
            if (a, i) != (b, j):
                found.append(_finding("T722", f"{where}: `{b}:{j}` is received where `{a}:{i}` is sent", place))
                break
        else:
            if len(sent) != len(received):
                extra = sent[len(received) :] or received[len(sent) :]
                message = f"{where}: {len(sent)} sends meet {len(received)} receives"
                found.append(_finding("T722", message, extra[0][2]))
    return found


def matching(plan: Plan) -> list[Finding]:
    """Findings of proof (b) over all orders."""
    findings: list[Finding] = []
    events = {}
    for role in plan.roles:
        events[role.pipeline], wrong = _events(plan, role)
        findings += wrong
    if findings:
        return findings[:MOST]
    for order, _ in plan.roles[0].orders:
        unrolled = {role.pipeline: _unroll(role, order, events[role.pipeline]) for role in plan.roles}
        findings += _collectives(plan, unrolled) + _transfers(plan, unrolled)
        if not findings:
            findings += _order(unrolled)
    return findings
