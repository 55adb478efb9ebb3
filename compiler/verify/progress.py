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
from collections.abc import Iterator, Sequence
from dataclasses import field
from itertools import chain

from titan.compiler.plan.alike import Like
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.instruction import Instruction, base_name
from titan.compiler.plan.listing import distinct
from titan.compiler.plan.program import Block, BlockCall, Plan, Role
from titan.compiler.verify.findings import Finding, at, crosses_programs, found_alike
from titan.compiler.verify.rings import in_ring, ring_progress
from titan.compiler.verify.threads import legs

STREAM = "stream "  # begins the names of queues that are no channels
_NEVER = -1  # the exchange of a wait for what was not issued: that is proof (a)'s finding
_NOBODY = -1  # the stage at the other end of a channel from a stage to itself


@dataclass(frozen=True, slots=True)
class _Action:
    """`wait`, or the issue of an exchange on `queue`, named `exchange`, between `members`."""

    index: int
    token: str  # base name of the pending register
    symbol: str
    queue: str = ""
    exchange: str = ""
    members: tuple[int, ...] = ()


def _places(plan: Plan, role: Role) -> dict[str, list[int]]:
    """By block the indices of what may block or unblock somebody: issues, and waits for what they make pending."""
    kinds = [i for block in role.blocks for i in distinct(block.instructions) if i.group and i.row.kind != "transfer"]
    crossing = {
        (group, stream) for group, stream in {(i.group, i.stream) for i in kinds} if crosses_programs(plan, group)
    }
    streams = {stream for _, stream in crossing}
    found: dict[str, list[int]] = {}
    watched: set[str] = set()
    for block in role.blocks:
        issued = [n for n, i in enumerate(block.instructions) if i.stream and _meets(i, streams)]
        watched.update(base_name(block.instructions[n].writes[0]) for n in issued)
        found[block.name] = issued
    for block in role.blocks:
        listed = enumerate(block.instructions)
        waits = [n for n, i in listed if i.opcode == "wait" and base_name(i.reads[0]) in watched]
        found[block.name] = sorted(found[block.name] + waits)
    return {name: indices for name, indices in found.items() if indices}


def _meets(instruction: Instruction, streams: set[str]) -> bool:
    """Whether an instruction issues what other programs meet, or what stands in a stream beside such. In a ring the
    neighbours do the same at the same time: see `ring_progress`."""
    row = instruction.row
    if not row.asynchronous or in_ring(instruction):
        return False
    return row.kind == "transfer" or instruction.stream in streams


def _action(plan: Plan, like: Like, index: int, instruction: Instruction) -> _Action:
    """What an instruction of the role that stands for another does in that one."""
    register = instruction.reads[0] if instruction.opcode == "wait" else instruction.writes[0]
    base, _, symbol = like.renaming.name(register.rstrip("?")).partition(":")
    stage = like.role.pipeline
    if instruction.opcode == "wait":
        return _Action(index, base, symbol)
    if instruction.row.kind == "transfer":
        peer = stage + int(instruction.attribute("peer"))
        ends = (stage, peer) if instruction.opcode == "send" else (peer, stage)
        channel = f"{ends[0]}->{ends[1]} {instruction.stream}"
        return _Action(index, base, symbol, channel, channel, ends)
    members = crosses_programs(plan, instruction.group) or (stage,)
    name = instruction.group if len(members) > 1 else f"{instruction.group} of {stage}"
    return _Action(index, base, symbol, STREAM + instruction.stream, name, members)


def _actions(plan: Plan, likes: Sequence[Like]) -> list[dict[str, list[_Action]]]:
    """Per role and block, where there are any. Where they stand is the same in roles that are alike."""
    places: dict[int, dict[str, list[int]]] = {}
    found = []
    for like in likes:
        first = like.first
        if first.pipeline not in places:
            places[first.pipeline] = _places(plan, first)
        known = places[first.pipeline]
        table = (
            (name, block.instructions, known[block.name]) for name, block in like.blocks.items() if block.name in known
        )
        found.append({name: [_action(plan, like, n, listed[n]) for n in indices] for name, listed, indices in table})
    return found


Row = tuple[int, int, int, int, int]


class _Numbers:
    """What programs issue and wait for, by number. Per role and block a row for each action: the end on which an
    exchange is issued (-1: a wait), the first exchange of its name (of a wait, its index in the block), the pending
    register, the place of its micro-batch among the arguments (-1: it has none), and the other end. An exchange without
    one stands in a stream, whose line is -1 minus that."""

    def __init__(self, roles: Sequence[Role], actions: Sequence[dict[str, list[_Action]]]) -> None:
        self.ends: dict[tuple[int, str], int] = {}  # (stage, channel or group) -> number
        self.lines: dict[tuple[int, str], int] = {}  # (stage, stream) -> number
        self.names: dict[str, int] = {}  # of exchanges: group or channel
        self.members: list[tuple[int, ...]] = []  # of the exchanges of a name
        self.tokens: dict[str, int] = {}
        self.many = _many(roles, actions)
        self.rows = [self._rows(role, listed) for role, listed in zip(roles, actions, strict=True)]

    def _rows(self, role: Role, actions: dict[str, list[_Action]]) -> dict[str, tuple[Row, ...]]:
        found: dict[str, tuple[Row, ...]] = dict.fromkeys(role.block_table, ())
        for name, listed in actions.items():
            found[name] = tuple(self._row(role.pipeline, role.block_table[name].parameters, a) for a in listed)
        return found

    def _row(self, stage: int, parameters: tuple[str, ...], action: _Action) -> Row:
        token = (self.tokens.setdefault(action.token, len(self.tokens)) + 1) * self.many
        place = parameters.index(action.symbol) if action.symbol in parameters else -1
        if not action.queue:
            return -1, action.index, token, place, -1
        if action.exchange not in self.names:
            self.names[action.exchange] = len(self.names)
            self.members.append(action.members)
        exchanges, own = self.names[action.exchange] * self.many, self._end(stage, action.exchange)
        if action.queue.startswith(STREAM):
            line = self.lines.setdefault((stage, action.queue), len(self.lines))
            return own, exchanges, token, place, -1 - line
        other = next((end for end in action.members if end != stage), _NOBODY)
        return own, exchanges, token, place, self._end(other, action.exchange)

    def _end(self, stage: int, name: str) -> int:
        return self.ends.setdefault((stage, name), len(self.ends))

    def named(self, exchange: int) -> str:
        return list(self.names)[exchange // self.many]


def _many(roles: Sequence[Role], actions: Sequence[dict[str, list[_Action]]]) -> int:
    """More than there are exchanges of a name in an order, or micro-batches: as small as may be, for small numbers are
    fast."""
    calls = max(len(calls) for role in roles for _, calls in role.orders)
    return 2 + calls * max((len(listed) for found in actions for listed in found.values()), default=1)


@dataclass
class _Program:
    """One role in an order, as far as it was gone through."""

    role: Role
    rows: dict[str, tuple[Row, ...]]
    calls: tuple[BlockCall, ...] = ()
    rest: Iterator[None] = iter(())  # goes on until the program is blocked
    issued: dict[int, int] = field(default_factory=dict)  # pending register -> exchange
    blocked: int | None = None
    at: tuple[int, int] = (0, 0)  # where it is blocked: call, and index in its block

    def place(self) -> tuple[Role, Block, int, int]:
        """Where it stands."""
        call, index = self.at
        return self.role, self.role.block_table[self.calls[call].block], index, call


class _Run:
    """Programs, the lines of their streams, and who has reached which exchange."""

    def __init__(self, roles: Sequence[Role], numbers: _Numbers) -> None:
        self.numbers, self.members = numbers, list(map(len, numbers.members))
        self.programs = [_Program(role, rows) for role, rows in zip(roles, numbers.rows, strict=True)]
        self.lines: list[deque[int]] = [deque() for _ in numbers.lines]
        self.issued = [0] * len(numbers.ends)  # exchanges of an end
        self.arrived: dict[int, list[int]] = {}
        self.done: set[int] = {_NEVER}
        self.waiting: defaultdict[int, list[_Program]] = defaultdict(list)

    def go_on(self, order: str) -> list[_Program]:
        """Runs an order to its end, from where those that it begins with have ended; the programs that are blocked."""
        for program in self.programs:
            calls = program.role.order(order)
            program.rest = chain(program.rest, self.steps(program, calls, len(program.calls)))
            program.calls = calls
        self.ready = [program for program in self.programs if program.blocked is None]
        while self.ready:
            self.advance(self.ready.pop())
        return [program for program in self.programs if program.blocked is not None]

    def advance(self, program: _Program) -> None:
        """Runs a program until it blocks or ends."""
        program.blocked = None
        next(program.rest, None)
        if program.blocked is not None:
            self.waiting[program.blocked].append(program)

    def steps(self, program: _Program, calls: tuple[BlockCall, ...], first: int) -> Iterator[None]:
        """Goes through calls of a program, and halts wherever that is blocked."""
        rows, pending, issued, done = program.rows, program.issued, self.issued, self.done
        for position, (block, arguments) in enumerate(calls[first:], first):
            for end, exchange, token, place, other in rows[block]:
                register = token + (arguments[place] if place >= 0 else -1)
                if end < 0:
                    waited = pending.get(register, _NEVER)
                    if waited not in done:
                        program.blocked, program.at = waited, (position, exchange)
                        yield
                    continue
                number = issued[end]
                issued[end] = number + 1
                pending[register] = exchange + number
                if other < 0:
                    self.queue(-1 - other, exchange + number)
                elif number < issued[other]:
                    self.happen(exchange + number)

    def happen(self, exchange: int) -> None:
        self.done.add(exchange)
        if exchange in self.waiting:
            self.ready += self.waiting.pop(exchange)

    def queue(self, line: int, exchange: int) -> None:
        self.lines[line].append(exchange)
        if len(self.lines[line]) == 1:
            self.arrive(line)

    def arrive(self, line: int) -> None:
        """The head of a line has reached its exchange; when all members have, it happens and the lines move on."""
        lines, arrived, heads = self.lines, self.arrived, [line]
        while heads:
            head = heads.pop()
            exchange = lines[head][0]
            there = arrived.setdefault(exchange, [])
            there.append(head)
            if len(there) >= self.members[exchange // self.numbers.many]:
                del arrived[exchange]
                self.happen(exchange)
                for other in there:
                    lines[other].popleft()
                    if lines[other]:
                        heads.append(other)


def _holds_up(run: _Run, program: _Program) -> int:
    """The stage that a blocked program waits for: a member that has not reached the exchange."""
    exchange, numbers = program.blocked, run.numbers
    assert exchange is not None
    reached = run.arrived.get(exchange, [])
    for (stage, _), line in numbers.lines.items():
        if line not in reached and exchange in run.lines[line]:
            return stage  # issued there, but behind something else
    name, number = numbers.named(exchange), exchange % numbers.many
    there = {stage for (stage, named), end in numbers.ends.items() if named == name and run.issued[end] > number}
    own, members = program.role.pipeline, numbers.members[exchange // numbers.many]
    return next((stage for stage in members if stage not in there and stage != own), own)


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
        text, number = " ".join(block.instructions[index].reads), exchange % run.numbers.many
        named = f"number {number} of {run.numbers.named(exchange)}"
        parts.append(f"stage {role.pipeline} waits at {block.name}[{index}] for {text} ({named})")
    end = "which waits for the first" if stage in path else f"and stage {stage} has ended without it"
    return at("T730", "deadlock: " + "; ".join(parts) + f", {end}", *table[cycle[0]].place())


def progress(plan: Plan) -> list[Finding]:
    """Findings of proof (c): at most one deadlock for each order."""
    findings = found_alike(plan, lambda likes: [f for k in likes if k.first is k.role for f in ring_progress(k.role)])
    actions = _actions(plan, plan.alike)
    numbers = _Numbers(plan.roles, actions)
    runs: dict[str, _Run] = {}
    for order, before in legs(plan.roles):
        run = runs[order] = runs.get(before) or _Run(plan.roles, numbers)
        blocked = run.go_on(order)
        if blocked:
            findings.append(_deadlock(run, blocked))
    return findings
