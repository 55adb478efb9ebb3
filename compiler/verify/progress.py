"""Proof (c): the programs run to the end, whatever the network buffers.

One synchronous execution decides it: there are no wildcard receives and no order that depends on data, so if the run
in which every exchange waits for its partner completes, every run does (Siegel and Avrunin). Issuing never blocks. A
wait blocks until the exchange has happened: both ends of a transfer, or all programs of a group, have it at the head of
their stream or channel, where exchanges happen one after the other. The two ends of a channel have the same exchanges
in the same order, so the n-th has happened when both have issued n. Exchanges inside one role complete among ranks that
do the same at the same time, so they are left out, unless they stand in a stream beside one that crosses programs.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import field

from titan.compiler.plan.alike import Like
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.listing import distinct
from titan.compiler.plan.program import Block, BlockCall, Plan, Role
from titan.compiler.verify.findings import Finding, at, crosses_programs, found_alike
from titan.compiler.verify.rings import in_ring, ring_progress
from titan.compiler.verify.threads import legs

_MANY = 1 << 32  # more than there are micro-batches, or exchanges on one channel
STREAM = "stream "  # begins the names of queues that are no channels
_NEVER = -1  # the exchange of a wait for what was not issued: that is proof (a)'s finding


@dataclass(frozen=True)
class _Action:
    """`wait`, or the issue of an exchange on `queue`, named `exchange`, between `members`."""

    index: int
    token: str  # base name of the pending register
    symbol: str
    queue: str = ""
    exchange: str = ""
    members: tuple[int, ...] = ()


def _places(plan: Plan, role: Role) -> list[list[int]]:
    """Per block the indices of what may block or unblock somebody: issues, and waits for what they make pending."""
    groups = {(i.group, i.stream) for b in role.blocks for i in distinct(b.instructions) if i.row.kind != "transfer"}
    streams = {stream for group, stream in groups if group and crosses_programs(plan, group)}
    found: list[list[int]] = []
    watched: set[str] = set()
    for block in role.blocks:
        issued = [n for n, i in enumerate(block.instructions) if i.stream and _meets(i, streams)]
        watched.update(_base(block.instructions[n].writes[0]) for n in issued)
        found.append(issued)
    for block, indices in zip(role.blocks, found, strict=True):
        waits = [n for n, i in enumerate(block.instructions) if i.opcode == "wait" and _base(i.reads[0]) in watched]
        indices[:] = sorted(indices + waits)
    return found


def _meets(instruction: Instruction, streams: set[str]) -> bool:
    """Whether an instruction issues what other programs meet, or what stands in a stream beside such. In a ring the
    neighbours do the same at the same time: see `ring_progress`."""
    row = instruction.row
    if not row.asynchronous or in_ring(instruction):
        return False
    return row.kind == "transfer" or instruction.stream in streams


def _base(register: str) -> str:
    return register.rstrip("?").partition(":")[0]


def _action(plan: Plan, role: Role, index: int, instruction: Instruction) -> _Action:
    register = instruction.reads[0] if instruction.opcode == "wait" else instruction.writes[0]
    base, _, symbol = register.rstrip("?").partition(":")
    if instruction.opcode == "wait":
        return _Action(index, base, symbol)
    if instruction.row.kind == "transfer":
        peer = role.pipeline + int(instruction.attribute("peer"))
        ends = (role.pipeline, peer) if instruction.opcode == "send" else (peer, role.pipeline)
        channel = f"{ends[0]}->{ends[1]} {instruction.stream}"
        return _Action(index, base, symbol, channel, channel, ends)
    members = crosses_programs(plan, instruction.group) or (role.pipeline,)
    name = instruction.group if len(members) > 1 else f"{instruction.group} of {role.pipeline}"
    return _Action(index, base, symbol, STREAM + instruction.stream, name, members)


def _actions(plan: Plan, likes: Sequence[Like]) -> list[dict[str, list[_Action]]]:
    """Per role and block. Where they stand is the same in roles that are alike."""
    places: dict[int, list[list[int]]] = {}
    found = []
    for like in likes:
        role, stage = like.role, like.first.pipeline
        if stage not in places:
            places[stage] = _places(plan, like.first)
        names = (block.name for block in role.blocks)
        table = zip(names, places[stage], strict=True)
        found.append({b: [_action(plan, role, n, like.instruction(b, n)) for n in indices] for b, indices in table})
    return found


@dataclass
class _Program:
    """One role in an order, as far as it was gone through. Everything is numbered: `steps` are exchanges to issue on
    the queue beside them in `queues`, or (queue -1) to wait for."""

    role: Role
    actions: dict[str, list[_Action]]
    rows: dict[str, list[tuple[int, int, int, int]]]  # block -> queue, name of the exchange, token, argument
    calls: tuple[BlockCall, ...] = ()
    steps: list[int] = field(default_factory=list)
    queues: list[int] = field(default_factory=list)
    step: int = 0
    issued: dict[int, int] = field(default_factory=dict)  # pending register -> exchange
    counts: dict[int, int] = field(default_factory=dict)  # name of exchanges -> how many were issued
    blocked: int | None = None

    def go_on(self, calls: tuple[BlockCall, ...]) -> None:
        """Takes up an order that begins with what was gone through."""
        rows, steps, queues, issued, counts = self.rows, self.steps, self.queues, self.issued, self.counts
        for block, arguments in calls[len(self.calls) :]:
            for queue, name, token, place in rows[block]:
                pending = token + (arguments[place] if place < len(arguments) else -1)
                if queue < 0:
                    steps.append(issued.get(pending, _NEVER))
                else:
                    number = counts.get(name, 0)
                    counts[name] = number + 1
                    issued[pending] = name * _MANY + number
                    steps.append(name * _MANY + number)
                queues.append(queue)
        self.calls = calls

    def place(self) -> tuple[Role, Block, int, int]:
        """Where it stands."""
        passed = 0
        for position, call in enumerate(self.calls):
            listed = self.actions[call.block]
            if self.step < passed + len(listed):
                return self.role, self.role.block_table[call.block], listed[self.step - passed].index, position
            passed += len(listed)
        raise IndexError(self.step)


class _Run:
    """Programs, the queues of their streams, and who has reached which exchange."""

    def __init__(self, roles: Sequence[Role], actions: Sequence[dict[str, list[_Action]]]) -> None:
        self.queues: dict[tuple[int, str], int] = {}  # (stage, stream or end of a channel) -> number
        self.names: dict[str, int] = {}  # of exchanges: group or channel
        self.members: list[int] = []  # of the exchanges of a name, how many
        self.tokens: dict[str, int] = {}
        self.programs = [
            _Program(role, listed, {b.name: [self._row(role, b, a) for a in listed[b.name]] for b in role.blocks})
            for role, listed in zip(roles, actions, strict=True)
        ]
        self.lines: list[deque[int]] = [deque() for _ in self.queues]
        self.ends = [self._other_end(stage, name) for stage, name in self.queues]
        self.issued = [0] * len(self.queues)  # exchanges of an end
        self.arrived: dict[int, list[int]] = {}
        self.done: set[int] = {_NEVER}
        self.waiting: defaultdict[int, list[_Program]] = defaultdict(list)

    def _row(self, role: Role, block: Block, action: _Action) -> tuple[int, int, int, int]:
        token = (self.tokens.setdefault(action.token, len(self.tokens)) + 1) * _MANY
        place = (*block.parameters, action.symbol).index(action.symbol)
        if not action.queue:
            return -1, -1, token, place
        if action.exchange not in self.names:
            self.names[action.exchange] = len(self.names)
            self.members.append(len(action.members))
        queue = self.queues.setdefault((role.pipeline, action.queue), len(self.queues))
        return queue, self.names[action.exchange], token, place

    def _other_end(self, stage: int, name: str) -> int:
        """The queue at the other end of a channel; of the queue of a stream, and where there is nobody, -1."""
        ends = [int(end) for end in name.split(" ")[0].split("->")] if not name.startswith(STREAM) else []
        return next((self.queues.get((end, name), -1) for end in ends if end != stage), -1)

    def go_on(self, order: str) -> list[_Program]:
        """Runs an order to its end, from where those that it begins with have ended; the programs that are blocked."""
        for program in self.programs:
            program.go_on(program.role.order(order))
        self.ready = [program for program in self.programs if program.blocked is None]
        while self.ready:
            self.advance(self.ready.pop())
        return [program for program in self.programs if program.blocked is not None]

    def advance(self, program: _Program) -> None:
        """Runs a program until it blocks or ends."""
        steps, queues, done, ends, issued = program.steps, program.queues, self.done, self.ends, self.issued
        program.blocked = None
        for step in range(program.step, len(steps)):
            exchange, queue = steps[step], queues[step]
            if queue >= 0:
                issued[queue] = number = issued[queue] + 1
                if ends[queue] < 0:
                    self.queue(queue, exchange)
                elif number <= issued[ends[queue]]:
                    self.happen(exchange)
            elif exchange not in done:
                program.step, program.blocked = step, exchange
                self.waiting[exchange].append(program)
                return
        program.step = len(steps)

    def happen(self, exchange: int) -> None:
        self.done.add(exchange)
        if exchange in self.waiting:
            self.ready += self.waiting.pop(exchange)

    def queue(self, queue: int, exchange: int) -> None:
        line = self.lines[queue]
        line.append(exchange)
        if len(line) == 1:
            self.arrive(queue)

    def arrive(self, queue: int) -> None:
        """The head of a queue has reached its exchange; when all members have, it happens and the queues move on."""
        lines, arrived, heads = self.lines, self.arrived, [queue]
        while heads:
            head = heads.pop()
            exchange = lines[head][0]
            there = arrived.get(exchange)
            if there is None:
                there = arrived[exchange] = []
            there.append(head)
            if len(there) >= self.members[exchange // _MANY]:
                del arrived[exchange]
                self.happen(exchange)
                for other in there:
                    lines[other].popleft()
                    if lines[other]:
                        heads.append(other)


def _holds_up(run: _Run, program: _Program) -> int:
    """The stage that a blocked program waits for: a member that has not reached the exchange."""
    exchange = program.blocked
    assert exchange is not None
    stages = [stage for stage, _ in run.queues]
    there = {stages[queue] for queue in run.arrived.get(exchange, [])}
    there |= {stages[queue] for queue in _ends(run, exchange) if run.issued[queue] > exchange % _MANY}
    for stage, line in zip(stages, run.lines, strict=True):
        if stage not in there and exchange in line:
            return stage  # issued there, but behind something else
    ends = _named(run, exchange).split(" ")[0].split("->")
    members = [int(e) for e in ends] if len(ends) == 2 else [p.role.pipeline for p in run.programs]
    return next((s for s in members if s not in there and s != program.role.pipeline), program.role.pipeline)


def _ends(run: _Run, exchange: int) -> list[int]:
    """Queues at the ends of a channel."""
    return [queue for (_, name), queue in run.queues.items() if name == _named(run, exchange)]


def _named(run: _Run, exchange: int) -> str:
    return list(run.names)[exchange // _MANY]


def _deadlock(run: _Run, blocked: list[_Program]) -> Finding:
    """Follows who waits for whom until a stage comes again, and tells the cycle."""
    table = {program.role.pipeline: program for program in blocked}
    path: list[int] = []
    stage = blocked[0].role.pipeline
    while stage in table and stage not in path:
        path.append(stage)
        stage = _holds_up(run, table[stage])
    cycle = path[path.index(stage) :] if stage in path else path
    parts = []
    for member in cycle:
        role, block, index, _ = table[member].place()
        exchange = table[member].blocked
        assert exchange is not None
        text, number = " ".join(block.instructions[index].reads), exchange % _MANY
        named = f"number {number} of {_named(run, exchange)}"
        parts.append(f"stage {role.pipeline} waits at {block.name}[{index}] for {text} ({named})")
    end = "which waits for the first" if stage in path else f"and stage {stage} has ended without it"
    return at("T730", "deadlock: " + "; ".join(parts) + f", {end}", *table[cycle[0]].place())


def progress(plan: Plan) -> list[Finding]:
    """Findings of proof (c): at most one deadlock for each order."""
    findings = found_alike(plan, lambda likes: [f for k in likes if k.first is k.role for f in ring_progress(k.role)])
    actions = _actions(plan, plan.alike)
    runs: dict[str, _Run] = {}
    for order, before in legs(plan.roles):
        run = runs[order] = runs.get(before) or _Run(plan.roles, actions)
        blocked = run.go_on(order)
        if blocked:
            findings.append(_deadlock(run, blocked))
    return findings
