"""Proof (c): the programs run to the end, whatever the network buffers.

One synchronous execution decides it: there are no wildcard receives and no order that depends on data, so if the run
in which every exchange waits for its partner completes, every run does (Siegel and Avrunin). Issuing never blocks. A
wait blocks until the exchange has happened: both ends of a transfer, or all programs of a group, have it at the head of
their stream or channel, where exchanges happen one after the other. Exchanges inside one role complete among ranks that
do the same at the same time, so they are left out, unless they stand in a stream beside one that crosses programs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.opcodes import OPCODES
from titan.compiler.plan.program import Block, Plan, Role
from titan.compiler.verify.findings import Finding, at, crosses_programs
from titan.compiler.verify.rings import in_ring, ring_progress

Token = tuple[str, int]  # pending register: base name and micro-batch
Queue = tuple[int, str]  # stage and name of a stream or of one end of a channel
Exchange = tuple[str, int]  # name of a group or channel, number of the exchange on it


@dataclass(frozen=True)
class _Action:
    """`wait`, or the issue of an exchange on `queue`, named `exchange`, between `members`."""

    index: int
    token: str
    symbol: str
    queue: str = ""
    exchange: str = ""
    members: tuple[int, ...] = ()


def _crossing_streams(plan: Plan, role: Role) -> set[str]:
    return {
        i.stream
        for b in role.blocks
        for i in b.instructions
        if i.group and i.row.kind != "transfer" and crosses_programs(plan, i.group)
    }


def _actions(plan: Plan, role: Role) -> dict[str, list[_Action]]:
    """Per block: what may block or unblock somebody."""
    streams = _crossing_streams(plan, role)
    watched: set[str] = set()
    found: dict[str, list[_Action]] = {}
    for block in role.blocks:
        actions = []
        for index, instruction in enumerate(block.instructions):
            if OPCODES[instruction.opcode].asynchronous:
                action = _issue(plan, role, index, instruction, streams)
                if action is not None:
                    watched.add(action.token)
                    actions.append(action)
        found[block.name] = actions
    for block in role.blocks:
        waits = []
        for index, instruction in enumerate(block.instructions):
            if instruction.opcode == "wait":
                base, _, symbol = instruction.reads[0].rstrip("?").partition(":")
                if base in watched:
                    waits.append(_Action(index, base, symbol))
        found[block.name] = sorted(found[block.name] + waits, key=lambda action: action.index)
    return found


def _issue(plan: Plan, role: Role, index: int, instruction: Instruction, streams: set[str]) -> _Action | None:
    base, _, symbol = instruction.writes[0].rstrip("?").partition(":")
    if in_ring(instruction):
        return None  # its neighbours do the same at the same time: see `ring_progress`
    if instruction.row.kind == "transfer":
        peer = role.pipeline + int(instruction.attribute("peer"))
        ends = (role.pipeline, peer) if instruction.opcode == "send" else (peer, role.pipeline)
        channel = f"{ends[0]}->{ends[1]} {instruction.stream}"
        return _Action(index, base, symbol, channel, channel, ends)
    if instruction.stream not in streams:
        return None
    members = crosses_programs(plan, instruction.group) or (role.pipeline,)
    name = instruction.group if len(members) > 1 else f"{instruction.group} of {role.pipeline}"
    return _Action(index, base, symbol, "stream " + instruction.stream, name, members)


@dataclass
class _Program:
    role: Role
    order: str
    actions: dict[str, list[_Action]]
    call: int = 0
    step: int = 0
    issued: dict[Token, Exchange] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    blocked: Exchange | None = None


@dataclass
class _Run:
    """Programs, the queues of their streams, and who has reached which exchange."""

    programs: list[_Program]
    queues: dict[Queue, deque[tuple[Exchange, tuple[int, ...]]]] = field(default_factory=dict)
    arrived: dict[Exchange, list[Queue]] = field(default_factory=dict)
    done: set[Exchange] = field(default_factory=set)
    waiting: dict[Exchange, list[_Program]] = field(default_factory=dict)
    ready: list[_Program] = field(default_factory=list)

    def execute(self) -> None:
        self.ready = list(self.programs)
        while self.ready:
            self.advance(self.ready.pop())

    def advance(self, program: _Program) -> None:
        """Runs a program until it blocks or ends."""
        program.blocked = None
        calls = program.role.order(program.order)
        table = program.role.block_table
        while program.call < len(calls):
            call = calls[program.call]
            actions = program.actions[call.block]
            if actions:
                arguments = dict(zip(table[call.block].parameters, call.arguments, strict=True))
                while program.step < len(actions):
                    action = actions[program.step]
                    token = (action.token, arguments.get(action.symbol, -1))
                    if action.queue:
                        self.issue(program, action, token)
                    elif not self.passes(program, token):
                        return
                    program.step += 1
            program.call += 1
            program.step = 0

    def passes(self, program: _Program, token: Token) -> bool:
        exchange = program.issued.get(token)
        if exchange is None or exchange in self.done:
            return True  # a wait for what was never issued is proof (a)'s finding
        program.blocked = exchange
        self.waiting.setdefault(exchange, []).append(program)
        return False

    def issue(self, program: _Program, action: _Action, token: Token) -> None:
        number = program.counts.get(action.exchange, 0)
        program.counts[action.exchange] = number + 1
        exchange = (action.exchange, number)
        program.issued[token] = exchange
        queue = (program.role.pipeline, action.queue)
        line = self.queues.setdefault(queue, deque())
        line.append((exchange, action.members))
        if len(line) == 1:
            self.arrive(queue)

    def arrive(self, queue: Queue) -> None:
        """The head of a queue has reached its exchange; when all members have, it happens and the queues move on."""
        heads = [queue]
        while heads:
            exchange, members = self.queues[heads.pop()][0]
            there = self.arrived.setdefault(exchange, [])
            there.append(queue)
            if len(there) < len(members):
                return
            del self.arrived[exchange]
            self.done.add(exchange)
            self.ready += self.waiting.pop(exchange, [])
            moved = [other for other in there if self.pop(other)]
            for other in moved[1:]:
                self.arrive(other)
            if moved:
                queue = moved[0]
                heads = [queue]

    def pop(self, queue: Queue) -> bool:
        line = self.queues[queue]
        line.popleft()
        return bool(line)


def _place(program: _Program) -> tuple[Role, Block, int, int]:
    call = program.role.order(program.order)[program.call]
    block = program.role.block_table[call.block]
    return program.role, block, program.actions[call.block][program.step].index, program.call


def _holds_up(run: _Run, program: _Program) -> int:
    """The stage that a blocked program waits for: a member that has not reached the exchange."""
    assert program.blocked is not None
    exchange = program.blocked
    there = {stage for stage, _ in run.arrived.get(exchange, [])}
    for (stage, _), line in run.queues.items():
        if stage not in there and any(entry == exchange for entry, _ in line):
            return stage  # issued there, but behind something else
    name = exchange[0]
    ends = name.split(" ")[0].split("->")
    stages = [int(e) for e in ends] if len(ends) == 2 else [p.role.pipeline for p in run.programs]
    return next((s for s in stages if s not in there and s != program.role.pipeline), program.role.pipeline)


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
        role, block, index, _ = _place(table[member])
        name = table[member].blocked
        assert name is not None
        text = " ".join(block.instructions[index].reads)
        parts.append(f"stage {role.pipeline} waits at {block.name}[{index}] for {text} (number {name[1]} of {name[0]})")
    end = "which waits for the first" if stage in path else f"and stage {stage} has ended without it"
    return at("T730", "deadlock: " + "; ".join(parts) + f", {end}", *_place(table[cycle[0]]))


def progress(plan: Plan) -> list[Finding]:
    """Findings of proof (c): at most one deadlock for each order."""
    findings = [finding for role in plan.roles for finding in ring_progress(role)]
    actions = {role.pipeline: _actions(plan, role) for role in plan.roles}
    for order, _ in plan.roles[0].orders:
        run = _Run([_Program(role, order, actions[role.pipeline]) for role in plan.roles])
        run.execute()
        blocked = [program for program in run.programs if program.blocked is not None]
        if blocked:
            findings.append(_deadlock(run, blocked))
    return findings
