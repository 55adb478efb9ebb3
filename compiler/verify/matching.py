"""Proof (b): members of a group issue the same collectives in the same order; every send meets its receive.

Rank symmetry. All ranks of a role run one program, and peers and groups are named relative to the mesh. So a group
whose members share a pipeline coordinate agrees with itself by construction; only groups that join several programs and
the transfers can disagree, and they do so for all ranks alike. Verifying roles verifies all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from titan.compiler.plan.alike import Like
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.instruction import Instruction, type_name
from titan.compiler.plan.listing import distinct
from titan.compiler.plan.opcodes import OPCODES
from titan.compiler.plan.operators import TensorType
from titan.compiler.plan.program import Block, BlockCall, Plan, Role
from titan.compiler.verify.findings import MOST, Finding, at, crosses_programs, found_alike
from titan.compiler.verify.rings import in_ring, ring_matching

_COLLECTIVE = frozenset(n for n, row in OPCODES.items() if row.kind == "collective") | {"unshard", "reduce_grad"}
_TRANSFER = frozenset(n for n, row in OPCODES.items() if row.kind == "transfer")
Place = tuple[Role, Block, int, int]  # role, block, index, call


@dataclass(frozen=True, slots=True)
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


def _events(plan: Plan, like: Like, known: dict[int, list[list[int]]]) -> tuple[dict[str, list[_Event]], list[Finding]]:
    """Per block, what other programs must match. Where that stands is `known` of a role to which this one is alike."""
    role, found = like.role, {}
    wrong: list[Finding] = []
    if like.first is role:
        known[role.pipeline] = _places(plan, role)
        wrong += ring_matching(plan, role)
    for block, indices in zip(role.blocks, known[like.first.pipeline], strict=True):
        events = []
        for index in indices:
            event, problem = _event(plan, role, index, like.instruction(block.name, index))
            wrong += [at(*problem, role, block, index)] if problem else []
            events += [event] if event else []
        if events:
            found[block.name] = events
    return found, wrong


def _places(plan: Plan, role: Role) -> list[list[int]]:
    """Per block the indices of collectives across programs, and of transfers between them."""
    groups = {i.group for block in role.blocks for i in distinct(block.instructions)}
    crossing = {group for group in groups if crosses_programs(plan, group)}
    return [
        [
            index
            for index, i in enumerate(block.instructions)
            if (i.group in crossing and i.opcode in _COLLECTIVE) or (i.opcode in _TRANSFER and not in_ring(i))
        ]
        for block in role.blocks
    ]


def _event(
    plan: Plan, role: Role, index: int, instruction: Instruction
) -> tuple[_Event | None, tuple[str, str] | None]:
    """What must be matched, and what is wrong with it in itself: code and message."""
    wrong = None
    if instruction.opcode in _COLLECTIVE:
        if role.pipeline not in crosses_programs(plan, instruction.group):
            wrong = ("T721", f"the ranks of this role are no members of group `{instruction.group}`")
        signature = (instruction.opcode, _size(plan, instruction), instruction.attributes, instruction.stream)
        return _Event(index, instruction, instruction.group, signature, _symbol(instruction.writes[0])), wrong
    if plan.mesh.resolve(instruction.group) != ("pipeline",):
        return None, ("T722", "transfers run along the pipeline axis")
    peer = role.pipeline + int(instruction.attribute("peer"))
    if peer == role.pipeline or not 0 <= peer < len(plan.roles):
        wrong = ("T722", f"there is no stage {peer} to exchange with")
    name = instruction.reads[0] if instruction.opcode == "send" else instruction.writes[0]
    base, _, symbol = name.rstrip("?").partition(":")
    return _Event(index, instruction, "", (base, peer), symbol), wrong


def _symbol(name: str) -> str:
    return name.rstrip("?").partition(":")[2]


Channel = tuple[int, int, str]  # sender, receiver, stream
_BATCHES = 1 << 32  # more than there are micro-batches


class _Ends:
    """What a role's blocks exchange: per block a row for each event, with the number of its end of a channel (-1: a
    collective), the number of its register (of a collective, its place among the events), and the place of its
    micro-batch among the arguments (-1: it has none)."""

    def __init__(self, role: Role, events: dict[str, list[_Event]], bases: dict[str, int]) -> None:
        self.role, self.events = role, events
        self.numbers: dict[tuple[Channel, bool], int] = {}  # (channel, whether it receives)
        self.rows: dict[str, list[tuple[int, int, int]]] = {name: [] for name in role.block_table}
        for name, listed in events.items():
            parameters = role.block_table[name].parameters
            self.rows[name] = [self._row(parameters, n, event, bases) for n, event in enumerate(listed)]

    def _row(
        self, parameters: tuple[str, ...], number: int, event: _Event, bases: dict[str, int]
    ) -> tuple[int, int, int]:
        place = parameters.index(event.symbol) if event.symbol in parameters else -1
        if event.instruction.opcode in _COLLECTIVE:
            return -1, number, place
        end = (self.channel(event), event.instruction.opcode == "recv")
        base = bases.setdefault(str(event.signature[0]), len(bases) + 1) * _BATCHES
        return self.numbers.setdefault(end, len(self.numbers)), base, place

    def channel(self, event: _Event) -> Channel:
        stage, peer = self.role.pipeline, int(str(event.signature[1]))
        ends = (stage, peer) if event.instruction.opcode == "send" else (peer, stage)
        return (*ends, event.instruction.stream)


class _Program:
    """What one role issues in an order, as far as it was gone through: its collectives across programs, and what passes
    each of its ends as numbers that stand for a register and a micro-batch (-1: none)."""

    def __init__(self, ends: _Ends) -> None:
        self.role, self.ends = ends.role, ends
        self.calls: tuple[BlockCall, ...] = ()
        self.collectives: list[tuple[_Event, int, Place]] = []
        self.passed: list[list[int]] = [[] for _ in ends.numbers]

    def go_on(self, calls: tuple[BlockCall, ...]) -> None:
        """Goes through an order that begins with what was gone through."""
        rows, passed, first = self.ends.rows, self.passed, len(self.calls)
        for position, (block, arguments) in enumerate(calls[first:], first):
            for end, base, place in rows[block]:
                batch = arguments[place] if place >= 0 else -1
                if end >= 0:
                    passed[end].append(base + batch)
                else:
                    self.collect(position, block, self.ends.events[block][base], batch)
        self.calls = calls

    def collect(self, position: int, block: str, event: _Event, batch: int) -> None:
        place = (self.role, self.role.block_table[block], event.index, position)
        self.collectives.append((event, batch, place))

    def end(self, channel: Channel, receives: bool) -> list[int]:
        """What passes an end, by number."""
        number = self.ends.numbers.get((channel, receives))
        return [] if number is None else self.passed[number]

    def transfers(self, channel: Channel, receives: bool) -> Iterator[tuple[str, int, Place]]:
        """What passes one end of a channel, in order: register, micro-batch and place."""
        for position, call in enumerate(self.calls):
            block = self.role.block_table[call.block]
            arguments = dict(zip(block.parameters, call.arguments, strict=True))
            for event in self.ends.events.get(call.block, ()):
                opcode = event.instruction.opcode
                if opcode in _TRANSFER and (opcode == "recv") == receives and self.ends.channel(event) == channel:
                    batch, place = arguments.get(event.symbol, -1), (self.role, block, event.index, position)
                    yield str(event.signature[0]), batch, place


def _finding(code: str, message: str, place: Place) -> Finding:
    return at(code, message, *place)


def _collectives(plan: Plan, programs: dict[int, _Program]) -> list[Finding]:
    """For each group across programs: all members' lists are equal, item by item."""
    found: list[Finding] = []
    lists: dict[str, dict[int, list[tuple[_Event, int, Place]]]] = {}
    for stage, program in programs.items():
        for item in program.collectives:
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


def _order(programs: dict[int, _Program]) -> list[Finding]:
    """One global order of all groups: the programs' issue orders, joined at shared collectives, have no cycle."""
    after: dict[tuple[str, int], set[tuple[str, int]]] = {}
    places: dict[tuple[str, int], Place] = {}
    for program in programs.values():
        counts: dict[str, int] = {}
        before: tuple[str, int] | None = None
        for event, _, place in program.collectives:
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


def _transfers(programs: dict[int, _Program]) -> list[Finding]:
    """Channel by channel, in order: the same register of the same micro-batch, one type."""
    found: list[Finding] = []
    for channel in dict.fromkeys(channel for program in programs.values() for channel, _ in program.ends.numbers):
        sender, receiver = programs[channel[0]], programs[channel[1]]
        if sender.end(channel, False) != receiver.end(channel, True):
            found.append(_unequal(channel, sender, receiver))
    return found


def _unequal(channel: Channel, sender: _Program, receiver: _Program) -> Finding:
    where = f"channel {channel[0]} -> {channel[1]} {channel[2]}"
    sent, received = list(sender.transfers(channel, False)), list(receiver.transfers(channel, True))
    for (a, i, _), (b, j, place) in zip(sent, received, strict=False):
        if (a, i) != (b, j):
            return _finding("T722", f"{where}: `{b}:{j}` is received where `{a}:{i}` is sent", place)
    extra = sent[len(received) :] or received[len(sent) :]
    return _finding("T722", f"{where}: {len(sent)} sends meet {len(received)} receives", extra[0][2])


def matching(plan: Plan) -> list[Finding]:
    """Findings of proof (b) over all orders."""
    events: dict[int, dict[str, list[_Event]]] = {}

    def blocks(likes: tuple[Like, ...]) -> list[Finding]:
        wrong: list[Finding] = []
        known: dict[int, list[list[int]]] = {}
        for like in likes:
            events[like.role.pipeline], found = _events(plan, like, known)
            wrong += found
        return wrong

    findings = found_alike(plan, blocks)
    if findings:
        return findings[:MOST]
    bases: dict[str, int] = {}
    ends = {role.pipeline: _Ends(role, events[role.pipeline], bases) for role in plan.roles}
    walked: dict[str, dict[int, _Program]] = {}
    for order, before in plan.legs:
        programs = walked[order] = walked.get(before) or {stage: _Program(found) for stage, found in ends.items()}
        for program in programs.values():
            program.go_on(program.role.order(order))
        findings += _collectives(plan, programs) + _transfers(programs)
        if not findings:
            findings += _order(programs)
    return findings
