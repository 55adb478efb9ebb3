"""Blocks as strands: what lies between two events that depend on another role is simulated once and remembered.

Inside a strand only the clocks of the role's own streams matter, and adding a time to all of them shifts every result
by that time. So a strand is simulated for the *differences* between the compute clock and the clocks it meets, and its
result is kept under them: in a repeating schedule nearly every call finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from titan.compiler.plan.alike import Like
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.instruction import FROM_HOST, TO_HOST, Instruction, base_name
from titan.compiler.plan.listing import Renaming, Stretch, copies, stretches, went_on
from titan.compiler.plan.opcodes import ASYNCHRONOUS
from titan.compiler.plan.program import Block, Role

COMPUTE, MOVE, WAIT = "compute", "move", "wait"  # kinds of work that loads a core
MEETING = ASYNCHRONOUS | {"wait"}  # may meet another role
COPIES = (TO_HOST, FROM_HOST)  # streams beside which compute is as fast as alone
Step = tuple[int, int, int, int]
Name = tuple[str, int]  # base register and index of the block's micro-batch parameter, -1 without


@dataclass(frozen=True, slots=True)
class Strand:
    """`steps`: (0, ns, 0, 0) compute; (1, ns, stream, slot) issue of a collective; (2, 0, 0, slot) wait; (3, ns,
    stream, slot) issue of a copy to or from the host. Slots from 0 on are the `imports`, issued outside; negative ones
    are issued here; `exports` are those still pending at the end."""

    steps: tuple[Step, ...]
    streams: tuple[str, ...]
    imports: int
    exports: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A strand where it stands: under which names its imports are pending, and its exports will be."""

    strand: Strand
    imports: tuple[Name, ...]
    exports: tuple[Name, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Relative to the compute clock at the start: times in ns. `latest`: the last end on the strand's streams, `active`
    the same without copies."""

    advance: int
    busy: int
    streams: tuple[int, ...]
    exports: tuple[int, ...]
    latest: int
    active: int
    work: tuple[tuple[int, int, str], ...] = ()  # (start, stop, COMPUTE, MOVE or WAIT), where asked for


@dataclass(frozen=True, slots=True)
class Event:
    """An instruction that meets another role: `kind` is send, recv, meet (a collective across programs) or wait. Of
    roles that are alike it is that of the first one, at the `cost` that it has in its own."""

    kind: str
    name: Name
    instruction: Instruction
    cost: int = 0
    peer: int = 0

    @property
    def group(self) -> str:
        return self.instruction.group

    @property
    def stream(self) -> str:
        return self.instruction.stream


@dataclass(frozen=True, slots=True)
class BlockPieces:
    """A block cut at its events; `units` says that it runs segments."""

    pieces: tuple[Part | Event, ...]
    units: bool


def run_strand(
    strand: Strand,
    streams: tuple[int, ...],
    imports: tuple[int, ...],
    active: int = 0,
    slowdown: float = 1.0,
    record: bool = False,
) -> Outcome:
    """Walk a strand from compute clock 0, with the streams' clocks and the completion times of its imports.

    Until `active`, and while a collective issued here runs, compute takes `slowdown` times as long; copies to the host
    have engines of their own. `record`: the outcome has its intervals of work.
    """
    clock = busy = 0
    clocks, work = list(streams), list[tuple[int, int, str]]()
    done = dict(enumerate(imports))
    for kind, cost, stream, slot in strand.steps:
        if kind == 0:
            taken = stretch(cost, active - clock, slowdown) if active > clock else cost
            if record:
                work.append((clock, clock + taken, COMPUTE))
            clock += taken
            busy += taken
        elif kind != 2:
            done[slot] = clocks[stream] = max(clock, clocks[stream]) + cost
            active = max(active, clocks[stream]) if kind == 1 else active
            if record:
                work.append((clocks[stream] - cost, clocks[stream], MOVE))
        else:
            if record and done[slot] > clock:
                work.append((clock, done[slot], WAIT))
            clock = max(clock, done[slot])
    exports = tuple([done[slot] for slot in strand.exports])
    beside = [end for name, end in zip(strand.streams, clocks, strict=True) if name not in COPIES]
    return Outcome(clock, busy, tuple(clocks), exports, max(clocks, default=0), max(beside, default=0), tuple(work))


def stretch(cost: int, beside: int, slowdown: float) -> int:
    """Time of `cost` ns of compute when the first `beside` ns run next to communication."""
    slowed = round(cost * slowdown)
    return slowed if slowed <= beside else cost + round(beside * (1 - 1 / slowdown))


class Cutter:
    """Cuts the blocks of roles. `price` gives ns of an instruction of a role; `crosses` says that a group holds ranks
    of other programs; `issue` is what of a transfer or a collective its rank is at work itself. Equal strands of all
    roles become one object, so that their outcomes are shared."""

    def __init__(
        self, price: Callable[[Role, Instruction], int], crosses: Callable[[str], bool], issue: int = 0
    ) -> None:
        self.price, self.crosses, self.issue = price, crosses, issue
        self.interned: dict[tuple[object, ...], Strand] = {}

    def cut(self, role: Role) -> dict[str, BlockPieces]:
        """Every block of a role in pieces."""
        written = [(block, stretches(block.instructions)) for block in role.blocks]
        external = {
            copy
            for _, parts in written
            for part in parts
            for i in part.instructions
            if i.stream and self._external(i)
            for name in i.writes
            for copy in copies(base_name(name), part.step, part.times)
        }
        return {block.name: self._cut(role, block, parts, external) for block, parts in written}

    def like(self, like: Like, pieces: Mapping[str, BlockPieces]) -> dict[str, BlockPieces]:
        """The pieces of a role by those of the role that is like it, where the groups of both lie alike: only what goes
        between roles has a price of its own. Completions stay under the first one's names, which no other role sees."""
        return {name: self._at(like.role, pieces[block.name]) for name, block in like.blocks.items()}

    def _at(self, role: Role, block: BlockPieces) -> BlockPieces:
        if not any(isinstance(piece, Event) for piece in block.pieces):
            return block
        return BlockPieces(tuple([self._piece(role, piece) for piece in block.pieces]), block.units)

    def _piece(self, role: Role, piece: Part | Event) -> Part | Event:
        if isinstance(piece, Part) or piece.kind == "wait":
            return piece
        return replace(piece, cost=self._cost(role, piece.instruction))

    def _cost(self, role: Role, i: Instruction) -> int:
        """Ns of an asynchronous instruction on its stream."""
        cost = self.price(role, i)
        return max(cost - self.issue, 0) if i.row.kind != "host" else cost

    def _add(self, piece: _Builder, role: Role, block: Block, i: Instruction) -> None:
        if i.opcode == "wait":
            piece.wait(_name(block, i.reads[0]))
        elif i.opcode in ASYNCHRONOUS:
            copies = i.row.kind == "host"  # is asked for in no time
            piece.compute(0 if copies else self.issue)
            piece.begin(_name(block, i.writes[0]), i.stream, copies, self._cost(role, i))
        else:
            piece.compute(self.price(role, i))

    def _external(self, i: Instruction) -> bool:
        """Transfers along the pipeline, and collectives that other roles take part in."""
        return bool(i.stream) and i.opcode in ASYNCHRONOUS and self.crosses(i.group)

    def _cut(self, role: Role, block: Block, parts: tuple[Stretch, ...], external: set[str]) -> BlockPieces:
        pieces: list[Part | Event] = []
        piece = _Builder()
        for part in parts:
            done = 0
            if part.times > 3 and not any(self._event(role, block, i, external) for i in part.instructions):
                done = self._repeat(piece, role, block, part)
            for number in range(done, part.times):
                for i in part.copy(number):
                    event = self._event(role, block, i, external) if external and i.opcode in MEETING else None
                    if event is None:
                        self._add(piece, role, block, i)
                        continue
                    if event.kind != "wait":
                        piece.compute(self.issue)
                    pieces += [*self._whole(piece), event]
                    piece = _Builder()
        units = any(i.row.unit for part in parts for i in part.instructions)
        return BlockPieces((*pieces, *self._whole(piece)), units)

    def _repeat(self, piece: _Builder, role: Role, block: Block, stretch: Stretch) -> int:
        """Adds copies of a stretch without events: three, and when the third adds what the second has added, the rest
        as well. How many it has added."""
        marks, pending, imports = [], dict(piece.pending), len(piece.imports)
        for number in range(3):
            if number == 1:
                imports = len(piece.imports)
            pending, issued = dict(piece.pending), piece.issued
            for i in stretch.copy(number):
                self._add(piece, role, block, i)
            marks.append(len(piece.steps) - 1)  # the last step may grow by the next
        more = piece.issued - issued
        one, other = piece.steps[marks[0] : marks[1]], piece.steps[marks[1] : marks[2]]
        if not one or len(piece.imports) > imports or _later(one, more) != other:
            return 3
        rest, last = stretch.times - 3, piece.steps[marks[2] :]
        del piece.steps[marks[2] :]
        for number in range(1, rest + 1):
            piece.steps += _later(other, number * more)
        piece.steps += _later(last, rest * more)
        piece.issued += rest * more
        went_on(piece.pending, pending, stretch, rest, _renamed, lambda slot, number: slot - number * more)
        return stretch.times

    def _whole(self, piece: _Builder) -> tuple[Part, ...]:
        if not piece.steps:
            return ()
        key = (tuple(piece.steps), tuple(piece.streams), len(piece.imports), tuple(piece.pending.values()))
        strand = self.interned.get(key) or self.interned.setdefault(key, Strand(*key))
        return (Part(strand, tuple(piece.imports), tuple(piece.pending)),)

    def _event(self, role: Role, block: Block, i: Instruction, external: set[str]) -> Event | None:
        if i.opcode == "wait":
            register = i.reads[0]
            return Event("wait", _name(block, register), i) if base_name(register) in external else None
        if not self._external(i):
            return None
        name, cost = _name(block, i.writes[0]), self._cost(role, i)
        if i.row.kind == "transfer":
            return Event(i.opcode, name, i, cost, int(i.attribute("peer", 1)))
        return Event("meet", name, i, cost)


def _later(steps: list[Step], issued: int) -> list[Step]:
    """The same steps after so many more issues."""
    return [step if not step[3] else (*step[:3], step[3] - issued) for step in steps]


def _renamed(renaming: Renaming, name: Name) -> Name:
    return renaming.name(name[0]), name[1]


def _name(block: Block, register: str) -> Name:
    base, _, parameter = register.rstrip("?").partition(":")
    return base, block.parameters.index(parameter) if parameter else -1


class _Builder:
    """Collects the instructions of one strand."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.streams: dict[str, int] = {}
        self.pending: dict[Name, int] = {}  # issued here, not yet waited for
        self.imports: dict[Name, int] = {}
        self.issued = 0

    def wait(self, name: Name) -> None:
        slot = self.pending.pop(name, None)
        self.steps.append((2, 0, 0, self.imports.setdefault(name, len(self.imports)) if slot is None else slot))

    def begin(self, name: Name, stream: str, copies: bool, cost: int) -> None:
        self.issued += 1
        self.pending[name] = -self.issued
        number = self.streams.setdefault(stream, len(self.streams))
        self.steps.append((3 if copies else 1, cost, number, -self.issued))

    def compute(self, cost: int) -> None:
        if cost:
            if self.steps and self.steps[-1][0] == 0:
                cost += self.steps.pop()[1]
            self.steps.append((0, cost, 0, 0))
