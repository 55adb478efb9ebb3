"""The time of a step: a discrete-event walk of the programs of all roles, over the very plan that runs.

One clock per stream in whole nanoseconds. An asynchronous instruction starts when its stream is free and it has been
issued; a transfer when both sides have issued it and the channel is free; a collective across programs when the last
member has issued it. `wait` moves the compute clock to the completion. Compute beside a running collective is slower by
the cluster's figure. Roles are walked in program order and suspended at what another role has not issued yet, so that
no queue of events is needed; ranks of a role behave alike.

    busy      time of compute instructions
    exposed   compute waits for communication in progress
    bubble    compute waits for another role that has not come so far
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from titan.compiler.cost.machine import Machine
from titan.compiler.cost.prices import Prices
from titan.compiler.cost.shared_cores import Loads
from titan.compiler.cost.strands import (
    COMPUTE,
    MOVE,
    WAIT,
    BlockPieces,
    Cutter,
    Event,
    Name,
    Outcome,
    Strand,
    run_strand,
)
from titan.compiler.cost.timeline import RoleTime, Timeline, added, stretched
from titan.compiler.plan.instruction import FROM_HOST, TO_HOST
from titan.compiler.plan.program import BEGUN, BlockCall, Plan, Role
from titan.compiler.plan.tiers import at_start

COPIES = (TO_HOST, FROM_HOST)  # streams beside which compute is as fast as alone


class SimulationStalled(Exception):
    """Roles wait for each other: the plan makes no progress (the verifier names the cycle)."""


def simulate(
    plan: Plan, machine: Machine | None = None, order: str = "train", prices: Prices | None = None
) -> Timeline:
    """Timeline of one order. `machine` defaults to the cluster in the plan's settings. Training steps that do not wait
    for the norm are timed in their steady state: what one more of them adds.

    Raises SimulationStalled when the programs wait for each other.
    """
    plan = at_start(plan)
    prices = prices or Prices(plan, machine)
    if order != "train" or not any(name == "body" for name, _ in plan.roles[0].orders):
        return _walk(plan, prices, [role.order(order) for role in plan.roles])[1]
    two, three = ([_late(role, steps) for role in plan.roles] for steps in (2, 3))
    if prices.machine.cores:  # a step would be slowed by what the next one loads cores with
        few, more = (_walk(plan, prices, calls)[1] for calls in (two, three))
    else:
        few, more = _walk(plan, prices, three, [len(calls) for calls in two])
    return added(few, more, _outside(prices))


def _late(role: Role, steps: int) -> tuple[BlockCall, ...]:
    """Steps one after another, each norm begun before its update and waited for after the next body."""
    body, check, update = (role.order(name) for name in ("body", "check", "update"))
    begun = tuple(call for call in check if call.block.endswith(BEGUN))
    return (*body, *begun, *update, *(*body, *check[len(begun) :], *begun, *update) * (steps - 1))


def _walk(
    plan: Plan, prices: Prices, calls: list[tuple[BlockCall, ...]], marks: list[int] | None = None
) -> tuple[Timeline, Timeline]:
    """The calls of every role walked to their ends: the first `marks` of them as if they were all, since what comes
    later changes nothing of what came before; and all."""
    network = _Network(plan, prices.machine)
    cutter = Cutter(prices.price, network.crosses)
    marks = marks or [len(own) for own in calls]
    walkers = [
        _Walker(role, own, cutter.cut(role), network, mark)
        for role, own, mark in zip(plan.roles, calls, marks, strict=True)
    ]
    ready = deque(walkers)
    while ready:
        ready.popleft().walk()
        ready += [walkers[k] for k in network.take_woken()]
    stuck = [w.role.pipeline for w in walkers if not w.done]
    if stuck:
        raise SimulationStalled(f"roles {', '.join(map(str, stuck))} wait for each other")
    if network.loads is not None:
        network.load_meetings()
    first, last = (_timeline(states, prices, network) for states in zip(*(w.states for w in walkers), strict=True))
    return first, last


def _timeline(states: tuple[_State, ...], prices: Prices, network: _Network) -> Timeline:
    step = max(state.until for state in states) + _outside(prices)
    found = Timeline(step, tuple(state.result(step) for state in states))
    return found if network.loads is None else stretched(found, network.loads.clock())


def _outside(prices: Prices) -> int:
    """Nanoseconds of a step outside its program."""
    return round(prices.machine.figures.get("step_seconds", 0.0) * 1e9)


@dataclass(slots=True)
class _Meeting:
    """A channel, or a group across programs: the k-th issues of its members belong together."""

    issued: list[list[int]]
    cost: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)

    def advance(self) -> None:
        while all(len(times) > len(self.ends) for times in self.issued):
            k = len(self.ends)
            start = max(times[k] for times in self.issued)
            if k:
                start = max(start, self.ends[-1])
            self.ends.append(start + self.cost[k])


class _Network:
    """All meetings by key, the roles that one of them has woken, and the outcomes of strands that roles share."""

    def __init__(self, plan: Plan, machine: Machine) -> None:
        self.plan = plan
        self.slowdown = 1.0 if machine.cores else machine.figures["overlap_slowdown"]
        self.loads = Loads(machine.cores) if machine.cores else None
        self.share, self.polling = 0.0, 0
        if self.loads is not None:
            nodes = max(min(machine.nodes, plan.mesh.world_size // machine.devices_per_node), 1)
            self.share = plan.mesh.world_size / len(plan.roles) / nodes  # ranks of a role on a node
            figures = machine.figures
            self.polling = round(1e9 * figures["polling_seconds"])
            self.weights = {COMPUTE: 1.0, MOVE: figures["communication_load"], WAIT: figures["polling_load"]}
        self.meetings: dict[tuple[object, ...], _Meeting] = {}
        self.woken: dict[int, None] = {}
        self.crossing: dict[str, tuple[int, ...]] = {}
        self.outcomes: dict[tuple[object, ...], Outcome] = {}

    def issue(self, key: tuple[object, ...], member: int, members: int, time: int, cost: int) -> tuple[_Meeting, int]:
        """Member `member` comes to its next meeting at `time`."""
        meeting = self.meetings.get(key)
        if meeting is None:
            meeting = self.meetings[key] = _Meeting([[] for _ in range(members)])
        k = len(meeting.issued[member])
        meeting.issued[member].append(time)
        if k == len(meeting.cost):
            meeting.cost.append(cost)
        else:
            meeting.cost[k] = max(meeting.cost[k], cost)
        meeting.advance()
        if meeting.waiting and len(meeting.ends) > k:
            self.woken.update(dict.fromkeys(meeting.waiting))
            meeting.waiting.clear()
        return meeting, k

    def members(self, group: str) -> tuple[int, ...]:
        """Pipeline coordinates that a group's members have, when it holds ranks of several programs; else nothing."""
        if group not in self.crossing:
            declared = self.plan.group_table.get(group)
            axes = self.plan.mesh.resolve(declared.axes if declared else group)
            chosen = (declared.pipeline if declared else ()) or tuple(r.pipeline for r in self.plan.roles)
            self.crossing[group] = chosen if "pipeline" in axes and len(chosen) > 1 else ()
        return self.crossing[group]

    def crosses(self, group: str) -> bool:
        return bool(self.members(group))

    def load(self, start: int, work: tuple[tuple[int, int, str], ...]) -> None:
        """What the ranks of one role do from `start` on."""
        assert self.loads is not None
        for begin, stop, kind in work:
            until = min(stop, begin + self.polling) if kind == WAIT else stop
            self.loads.add(start + begin, start + until, self.share * self.weights[kind])

    def load_meetings(self) -> None:
        """Transfers and collectives across roles: every member takes part."""
        for meeting in self.meetings.values():
            for end, cost in zip(meeting.ends, meeting.cost, strict=True):
                for _ in meeting.issued:
                    self.load(end, ((-cost, 0, MOVE),))

    def take_woken(self) -> list[int]:
        found, self.woken = list(self.woken), {}
        return found


@dataclass(frozen=True, slots=True)
class _State:
    """A role after so many calls: `clock` of its compute, `until` the end of all it has begun."""

    pipeline: int
    clock: int
    until: int
    busy: int
    exposed: int
    span_bubble: int
    calls: tuple[tuple[int, int], ...]

    def result(self, step: int) -> RoleTime:
        """Its part of a step that ends here."""
        idle = step - self.busy - self.exposed
        return RoleTime(self.pipeline, self.busy, self.exposed, idle, self.span_bubble, self.clock, self.calls)


class _Walker:
    """One role on its way through its order. `states`: after the first `mark` calls, and at the end."""

    def __init__(
        self, role: Role, calls: tuple[BlockCall, ...], pieces: dict[str, BlockPieces], network: _Network, mark: int
    ) -> None:
        self.role, self.order, self.pieces, self.network = role, calls, pieces, network
        self.marks = (mark, len(calls))
        self.states: list[_State] = []
        self.position = self.index = 0
        self.clock = self.busy = self.exposed = self.bubble = self.last = 0
        self.streams: dict[str, int] = {"": 0}
        self.pending: dict[tuple[str, int], int] = {}
        self.meetings: dict[tuple[str, int], tuple[_Meeting, int]] = {}
        self.outcomes = network.outcomes
        self.calls: list[tuple[int, int]] = []
        self.started = -1
        self.bubble_first = -1
        self.bubble_last = 0
        self._note()

    @property
    def done(self) -> bool:
        return self.position == len(self.order)

    def walk(self) -> None:
        """Go on until the end or until something has not been issued yet."""
        while self.position < len(self.order):
            call = self.order[self.position]
            block = self.pieces[call.block]
            pieces = block.pieces
            while self.index < len(pieces):
                piece = pieces[self.index]
                if isinstance(piece, Strand):
                    self._run(piece, call.arguments)
                elif piece.kind != "wait":
                    self._issue(piece, call.arguments)
                elif not self._wait(piece.name, call.arguments):
                    return
                self.index += 1
            self._finish(block.units)

    def _finish(self, units: bool) -> None:
        self.calls.append((self.clock if self.started < 0 else self.started, self.clock))
        if units:
            self.bubble_last = self.bubble
        self.position, self.index, self.started = self.position + 1, 0, -1
        if self.position in self.marks:
            self._note()

    def _note(self) -> None:
        """Keeps the state as often as this position is marked."""
        until = max(self.clock, self.last, *self.streams.values())
        span = self.bubble_last - max(self.bubble_first, 0)
        calls = tuple(self.calls)
        state = _State(self.role.pipeline, self.clock, until, self.busy, self.exposed, span, calls)
        self.states += [state] * self.marks.count(self.position)

    def _run(self, strand: Strand, arguments: tuple[int, ...]) -> None:
        now, streams = self.clock, self.streams
        clocks = tuple([max(streams.get(s, 0) - now, 0) for s in strand.streams])
        imports = tuple([max(self.pending.pop(_concrete(n, arguments)) - now, 0) for n in strand.imports])
        active = max(max(end for name, end in streams.items() if name not in COPIES) - now, 0)
        key = (id(strand), clocks, imports, active)
        found = self.outcomes.get(key)
        if found is None:
            record = self.network.loads is not None
            found = self.outcomes[key] = run_strand(strand, clocks, imports, active, self.network.slowdown, record)
        if self.started < 0 and found.busy:
            self.started = now
        if self.bubble_first < 0 and self.pieces[self.order[self.position].block].units and found.busy:
            self.bubble_first = self.bubble
        if found.work:
            self.network.load(now, found.work)
        self.clock = now + found.advance
        self.busy += found.busy
        self.exposed += found.advance - found.busy
        for name, relative in zip(strand.streams, found.streams, strict=True):
            streams[name] = now + relative
        for (_, pending), relative in zip(strand.exports, found.exports, strict=True):
            self.pending[_concrete(pending, arguments)] = now + relative

    def _issue(self, event: Event, arguments: tuple[int, ...]) -> None:
        mine = self.role.pipeline
        if event.kind == "meet":
            members = self.network.members(event.group)
            time = max(self.clock, self.streams.get(event.stream, 0))
            key = (event.group, event.stream)
            found = self.network.issue(key, members.index(mine), len(members), time, event.cost)
        else:
            found = self.network.issue(self._channel(event), int(event.kind == "recv"), 2, self.clock, event.cost)
        self.meetings[_concrete(event.name, arguments)] = found

    def _channel(self, event: Event) -> tuple[object, ...]:
        """(axis, stream, sender, receiver), or the sender's offset where both are ranks of this role."""
        mine, sends = self.role.pipeline, event.kind == "send"
        if event.group == "pipeline":
            pair = (mine, mine + event.peer) if sends else (mine + event.peer, mine)
        else:
            pair = (mine, event.peer if sends else -event.peer)
        return (event.group, event.stream, *pair)

    def _wait(self, name: Name, arguments: tuple[int, ...]) -> bool:
        """False when the other side has not come yet; then this role is woken later."""
        concrete = _concrete(name, arguments)
        meeting, k = self.meetings[concrete]
        if len(meeting.ends) <= k:
            meeting.waiting.append(self.role.pipeline)
            return False
        del self.meetings[concrete]
        end = meeting.ends[k]
        self.last = max(self.last, end)
        if end > self.clock:
            waited = end - self.clock
            if self.network.loads is not None:
                self.network.load(self.clock, ((0, waited, WAIT),))
            moving = min(waited, meeting.cost[k])
            self.exposed += moving
            self.bubble += waited - moving
            self.clock = end
        return True


def _concrete(name: Name, arguments: tuple[int, ...]) -> tuple[str, int]:
    base, index = name
    return base, arguments[index] if index >= 0 else -1
