"""Proof (c): the programs run to the end, whatever the network buffers.

One synchronous execution decides it: there are no wildcard receives and no order that depends on data, so if the run
in which every exchange waits for its partner completes, every run does (Siegel and Avrunin). Issuing never blocks. A
wait blocks until the exchange has happened: both ends of a transfer, or all programs of a group, have it at the head of
their stream or channel, where exchanges happen one after the other. The two ends of a channel have the same exchanges
in the same order, so the n-th has happened when both have issued n. Exchanges inside one role complete among ranks that
do the same at the same time, so they are left out, unless they stand in a stream beside one that crosses programs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import field
from itertools import chain, count

from titan.compiler.plan.alike import Like
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.instruction import Instruction, base_name
from titan.compiler.plan.listing import distinct
from titan.compiler.plan.program import Block, BlockCall, Plan, Role
from titan.compiler.verify.findings import Finding, at, crosses_programs, found_alike
from titan.compiler.verify.rings import in_ring, ring_progress

_MANY = 1 << 20  # more than there are micro-batches
STREAM = "stream "  # begins the names of queues that are no channels
_NEVER = -1  # number of the exchange of a wait for what was not issued: that is proof (a)'s finding
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
Exchange = tuple[str, int]  # group, and the number of the exchange


class _Numbers:
    """What programs issue and wait for, by number. An end is what a stage has of a channel or a group. Per role and
    block a row for each action: the end, the pending register, the place of its micro-batch among the arguments (-1: it
    has none), the other end of a channel (of a group -1 minus the line of the stream), and of a wait its index in the
    block (-1: an issue)."""

    def __init__(self, roles: Sequence[Role], actions: Sequence[dict[str, list[_Action]]]) -> None:
        self.ends: dict[tuple[int, str], int] = {}  # (stage, channel or group) -> number
        self.lines: dict[tuple[int, str], int] = {}  # (stage, stream) -> number
        self.members: dict[str, tuple[int, ...]] = {}  # of channels and groups
        self.rows = [self._rows(role, listed) for role, listed in zip(roles, actions, strict=True)]
        self.named = [name for _, name in self.ends]

    def _rows(self, role: Role, actions: dict[str, list[_Action]]) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = {block.name: [] for block in role.blocks}
        issues = [action for listed in actions.values() for action in listed if action.queue]
        ends: dict[str, dict[tuple[int, int], int]] = {}  # pending register -> the ends on which it is issued
        tokens = count(1)
        for action in issues:
            ends.setdefault(action.token, {}).setdefault(self._ends(role.pipeline, action), next(tokens) * _MANY)
        for name, listed in actions.items():
            parameters = role.block_table[name].parameters
            for action in listed:
                place = parameters.index(action.symbol) if action.symbol in parameters else -1
                known = ends.get(action.token, {})
                if action.queue:
                    end, other = self._ends(role.pipeline, action)
                    found[name].append((end, known[end, other], place, other, -1))
                else:
                    found[name] += ((end, token, place, other, action.index) for (end, other), token in known.items())
        return found

    def _ends(self, stage: int, action: _Action) -> tuple[int, int]:
        """The end on which an exchange is issued, and the other one, or the line."""
        self.members[action.exchange] = action.members
        own = self._end(stage, action.exchange)
        if action.queue.startswith(STREAM):
            return own, -1 - self.lines.setdefault((stage, action.queue), len(self.lines))
        return own, self._end(next((end for end in action.members if end != stage), _NOBODY), action.exchange)

    def _end(self, stage: int, name: str) -> int:
        return self.ends.setdefault((stage, name), len(self.ends))


@dataclass
class _Program:
    """One role in an order, as far as it was gone through."""

    role: Role
    rows: dict[str, list[Row]]
    calls: tuple[BlockCall, ...] = ()
    rest: Iterator[None] = iter(())  # goes on until the program is blocked
    issued: dict[int, int] = field(default_factory=dict)  # pending register -> number of the exchange on its end
    blocked: tuple[int, int] | None = None  # end, and the number of the exchange that it waits for
    at: tuple[int, int] = (0, 0)  # where: call, and index in its block

    def place(self) -> tuple[Role, Block, int, int]:
        """Where it stands."""
        call, index = self.at
        return self.role, self.role.block_table[self.calls[call].block], index, call


class _Run:
    """Programs, how much was issued on each end, and the lines of streams."""

    def __init__(self, roles: Sequence[Role], numbers: _Numbers) -> None:
        self.numbers = numbers
        self.programs = [_Program(role, rows) for role, rows in zip(roles, numbers.rows, strict=True)]
        self.issued = [0] * len(numbers.ends)
        self.wanted = [_NEVER] * len(numbers.ends)  # number for which a program waits at an end
        self.waiting: dict[int, _Program] = {}  # by the end
        self.lines: list[deque[Exchange]] = [deque() for _ in numbers.lines]
        self.arrived: dict[Exchange, list[int]] = {}
        self.done: set[Exchange] = set()  # of groups

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
            end, self.wanted[end] = program.blocked
            self.waiting[end] = program

    def steps(self, program: _Program, calls: tuple[BlockCall, ...], first: int) -> Iterator[None]:
        """Goes through calls of a program, and halts wherever that is blocked."""
        rows, pending, issued, wanted = program.rows, program.issued, self.issued, self.wanted
        for position, (block, arguments) in enumerate(calls[first:], first):
            for end, token, place, other, index in rows[block]:
                register = token + (arguments[place] if place >= 0 else -1)
                if index >= 0:
                    number = pending.get(register, _NEVER)
                    if number >= issued[other] if other >= 0 else not self.happened(end, number):
                        program.blocked, program.at = (end, number), (position, index)
                        yield
                    continue
                pending[register] = number = issued[end]
                issued[end] = number + 1
                if other < 0:
                    self.queue(-1 - other, (self.numbers.named[end], number))
                elif wanted[other] == number:
                    self.wake(other)

    def wake(self, end: int) -> None:
        self.wanted[end] = _NEVER
        self.ready.append(self.waiting.pop(end))

    def happened(self, end: int, number: int) -> bool:
        return number == _NEVER or (self.numbers.named[end], number) in self.done

    def queue(self, line: int, exchange: Exchange) -> None:
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
            if len(there) >= len(self.numbers.members[exchange[0]]):
                self.happen(exchange)
                for other in arrived.pop(exchange):
                    lines[other].popleft()
                    if lines[other]:
                        heads.append(other)

    def happen(self, exchange: Exchange) -> None:
        self.done.add(exchange)
        for end in [end for end in self.waiting if (self.numbers.named[end], self.wanted[end]) == exchange]:
            self.wake(end)


def _holds_up(run: _Run, program: _Program) -> int:
    """The stage that a blocked program waits for: a member that has not reached the exchange."""
    assert program.blocked is not None
    numbers, (end, number) = run.numbers, program.blocked
    name = numbers.named[end]
    reached = run.arrived.get((name, number), [])
    for (stage, _), line in numbers.lines.items():
        if line not in reached and (name, number) in run.lines[line]:
            return stage  # issued there, but behind something else
    there = {stage for (stage, named), end in numbers.ends.items() if named == name and run.issued[end] > number}
    own = program.role.pipeline
    return next((stage for stage in numbers.members[name] if stage not in there and stage != own), own)


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
        blocked_end, number = table[member].blocked or (0, 0)
        text, named = " ".join(block.instructions[index].reads), f"number {number} of {run.numbers.named[blocked_end]}"
        parts.append(f"stage {role.pipeline} waits at {block.name}[{index}] for {text} ({named})")
    end = "which waits for the first" if stage in path else f"and stage {stage} has ended without it"
    return at("T730", "deadlock: " + "; ".join(parts) + f", {end}", *table[cycle[0]].place())


def progress(plan: Plan) -> list[Finding]:
    """Findings of proof (c): at most one deadlock for each order."""
    findings = found_alike(plan, lambda likes: [f for k in likes if k.first is k.role for f in ring_progress(k.role)])
    actions = _actions(plan, plan.alike)
    numbers = _Numbers(plan.roles, actions)
    runs: dict[str, _Run] = {}
    for order, before in plan.legs:
        run = runs[order] = runs.get(before) or _Run(plan.roles, numbers)
        blocked = run.go_on(order)
        if blocked:
            findings.append(_deadlock(run, blocked))
    return findings
