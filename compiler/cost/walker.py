"""One role on its way through its calls, as a coroutine that stops at what another role has not issued yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from titan.compiler.cost.meetings import UNKNOWN, Channel, Meeting, Network
from titan.compiler.cost.strands import WAIT, BlockPieces, Event, Outcome, Part, Strand, run_strand
from titan.compiler.cost.timeline import RoleTime
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.program import BlockCall

Key = int | tuple[int, ...]  # what is active alone, or that, the streams' clocks and the imports


@dataclass(slots=True)
class Run:
    """A strand, its streams by number, and the completions that it takes and leaves: each a table by micro-batch, and
    where the call's arguments say which (-1: nowhere)."""

    strand: Strand
    streams: tuple[int, ...]
    imports: tuple[tuple[dict[int, int], int], ...]
    exports: tuple[tuple[dict[int, int], int], ...]
    outcomes: dict[Key, Outcome]

    def situation(self, clock: int, active: int, streams: list[int], arguments: tuple[int, ...]) -> Key:
        """All that decides the outcome: times from `clock` on."""
        times = [active]
        times += [streams[number] for number in self.streams]
        times += [ends.pop(arguments[index] if index >= 0 else -1) for ends, index in self.imports]
        return tuple([time - clock if time > clock else 0 for time in times])

    def outcome(self, key: Key, network: Network) -> Outcome:
        """Works out and keeps what follows from a situation."""
        strand = self.strand
        active, *times = (key, *(0 for _ in (*self.streams, *self.imports))) if isinstance(key, int) else key
        streams, imports = tuple(times[: len(strand.streams)]), tuple(times[len(strand.streams) :])
        found = run_strand(strand, streams, imports, active, network.slowdown, network.loads is not None)
        self.outcomes[key] = found
        return found


class Runs:
    """Strands as roles come to them: their streams are numbered, their outcomes remembered for all roles."""

    def __init__(self) -> None:
        self.streams: dict[str, int] = {}
        self.outcomes: dict[int, dict[Key, Outcome]] = {}
        self.alone: dict[int, Run] = {}  # of strands that neither take nor leave completions: for all roles

    def stream(self, name: str) -> int:
        return self.streams.setdefault(name, len(self.streams))

    def run(self, part: Part, pending: dict[str, dict[int, int]]) -> Run:
        """`pending`: completions of the role by register and micro-batch."""
        strand = part.strand
        if id(strand) in self.alone:
            return self.alone[id(strand)]
        streams = tuple([self.stream(name) for name in strand.streams])
        imports = tuple([(pending.setdefault(name, {}), index) for name, index in part.imports])
        exports = tuple([(pending.setdefault(name, {}), index) for name, index in part.exports])
        found = Run(strand, streams, imports, exports, self.outcomes.setdefault(id(strand), {}))
        if not imports and not exports:
            self.alone[id(strand)] = found
        return found


@dataclass(slots=True)
class Issue:
    """A role comes to its next meeting, when `stream` is free too (-1: whatever streams do)."""

    meetings: dict[int, Meeting]
    index: int
    channel: Channel
    member: int
    stream: int
    cost: int


@dataclass(slots=True)
class Wait:
    """A role waits for the end of a meeting."""

    meetings: dict[int, Meeting]
    index: int


@dataclass(frozen=True, slots=True)
class Steps:
    """What a block does; `units` says that it runs segments."""

    steps: tuple[Run | Issue | Wait, ...]
    units: bool


class Walker:
    """Clocks in ns and sums so far. `latest`: the end of all that the role's streams have begun; `active`: the same
    without copies, beside which compute is as fast as alone."""

    def __init__(self, pipeline: int, pieces: Mapping[str, BlockPieces], network: Network, runs: Runs) -> None:
        self.pipeline, self.network = pipeline, network
        self.pending: dict[str, dict[int, int]] = {}  # completions by register and micro-batch
        self.meetings: dict[str, dict[int, Meeting]] = {}
        self.blocks = {
            name: Steps(tuple([self._step(piece, runs) for piece in block.pieces]), block.units)
            for name, block in pieces.items()
        }
        self.streams = [0] * len(runs.streams)
        self.clock = self.busy = self.exposed = self.bubble = self.latest = self.active = 0
        self.bubble_first, self.bubble_last = -1, 0

    def _step(self, piece: Part | Event, runs: Runs) -> Run | Issue | Wait:
        if isinstance(piece, Part):
            return runs.run(piece, self.pending)
        name, index = piece.name
        meetings = self.meetings.setdefault(name, {})
        if piece.kind == "wait":
            return Wait(meetings, index)
        channel, member = self.network.member(self.pipeline, piece)
        stream = runs.stream(piece.stream) if piece.kind == "meet" else -1
        return Issue(meetings, index, channel, member, stream, piece.cost)

    def walk(self, calls: Sequence[BlockCall]) -> Iterator[None]:
        """Goes through the calls; yields when it has to be woken by another role."""
        network, streams, blocks = self.network, self.streams, self.blocks
        loads = network.loads is not None
        clock, latest, active = self.clock, self.latest, self.active
        busy, exposed, bubble, first = self.busy, self.exposed, self.bubble, self.bubble_first
        for name, arguments in calls:
            block = blocks[name]
            for step in block.steps:
                if type(step) is Wait:
                    meeting = step.meetings.pop(arguments[step.index] if step.index >= 0 else -1)
                    while meeting.end == UNKNOWN:
                        meeting.channel.waiting.append(self)
                        yield
                    if meeting.end > clock:
                        waited = meeting.end - clock
                        moving = waited if waited < meeting.cost else meeting.cost
                        if loads:
                            network.load(clock, ((0, waited, WAIT),))
                        exposed += moving
                        bubble += waited - moving
                        clock = meeting.end
                elif type(step) is Issue:
                    time = streams[step.stream] if step.stream >= 0 and streams[step.stream] > clock else clock
                    meeting = step.channel.issue(step.member, time, step.cost)
                    step.meetings[arguments[step.index] if step.index >= 0 else -1] = meeting
                elif type(step) is Run:
                    if latest <= clock:  # all that was begun has ended
                        key: Key = 0
                        for ends, index in step.imports:
                            del ends[arguments[index] if index >= 0 else -1]
                    elif step.imports or step.streams:
                        key = step.situation(clock, active, streams, arguments)
                    else:
                        key = active - clock if active > clock else 0
                    found = step.outcomes.get(key) or step.outcome(key, network)
                    if first < 0 and block.units and found.busy:
                        first = bubble
                    if loads:
                        network.load(clock, found.work)
                    if step.exports:
                        for (ends, index), relative in zip(step.exports, found.exports, strict=True):
                            ends[arguments[index] if index >= 0 else -1] = clock + relative
                    if found.latest > found.advance:  # else the role's clock is later than its streams'
                        for number, relative in zip(step.streams, found.streams, strict=True):
                            streams[number] = clock + relative
                        latest = max(latest, clock + found.latest)
                        active = max(active, clock + found.active)
                    busy += found.busy
                    exposed += found.advance - found.busy
                    clock += found.advance
            if block.units:
                self.bubble_last = bubble
        self.clock, self.latest, self.active = clock, latest, active
        self.busy, self.exposed, self.bubble, self.bubble_first = busy, exposed, bubble, first

    def tables(self) -> tuple[dict[int, int] | dict[int, Meeting], ...]:
        """What is under way: completions and meetings that are not waited for yet, by micro-batch."""
        return (*self.pending.values(), *self.meetings.values())

    def result(self, step: int) -> RoleTime:
        """Its part of a step that ends here."""
        idle, span = step - self.busy - self.exposed, self.bubble_last - max(self.bubble_first, 0)
        return RoleTime(self.pipeline, self.busy, self.exposed, idle, span, self.clock)
