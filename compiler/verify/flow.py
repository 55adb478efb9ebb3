"""The flow of one micro-batch through a role's blocks: every segment run forward, run again, run backward.

A register is written once for each micro-batch, so its name stands for its value whatever the order of the blocks. The
forward instructions give a graph of values and consumers. A recomputed value must be the image of a forward value: the
same segment or collective applied to images. A gradient is followed as the set of consumers whose contributions it
holds: it may only be used as *the* gradient of a value when it holds all of them, each once. So backward is checked to
be the transpose of forward, whoever wrote it.
"""

from __future__ import annotations

from dataclasses import field

from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.instruction import BACK, Instruction, type_name
from titan.compiler.plan.layout import dual
from titan.compiler.plan.program import Block, Plan, Role
from titan.compiler.plan.segment import Segment, parse_unit
from titan.compiler.verify.findings import Finding, at
from titan.compiler.verify.piece import Piece
from titan.compiler.verify.rings import Circulation, Exchange, bare, in_ring
from titan.compiler.verify.units import gradient_inputs, gradient_outputs

Edge = tuple[str, int]  # (consumer, number of its operand)
_COLLECTIVES = frozenset(("all_gather", "reduce_scatter", "all_reduce", "all_to_all"))
_TRANSPOSE = {
    "all_gather": ("reduce_scatter",),
    "reduce_scatter": ("all_gather",),
    "all_reduce": ("all_reduce",),
    "all_to_all": ("all_to_all",),
}
Place = tuple[Block, int]


@dataclass(frozen=True)
class Gradient:
    """A gradient register: of which value, and the consumers whose contributions it holds."""

    value: str
    edges: frozenset[Edge]


@dataclass
class Flow:
    plan: Plan
    role: Role
    findings: list[Finding] = field(default_factory=list)
    forwards: dict[str, Instruction] = field(default_factory=dict)  # unit -> instruction
    moves: dict[str, tuple[str, Instruction]] = field(default_factory=dict)  # result -> (source, collective)
    sources: dict[str, str] = field(default_factory=dict)  # load_batch: register -> what
    consumers: dict[str, list[Edge]] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)  # register -> peer
    sent: dict[str, int] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)  # unit -> where it runs forward
    images: dict[str, str] = field(default_factory=dict)  # recomputed register -> forward register
    gradients: dict[str, Gradient] = field(default_factory=dict)
    backwards: dict[str, list[str]] = field(default_factory=dict)
    returned: set[str] = field(default_factory=set)
    losses: list[str] = field(default_factory=list)
    place: tuple[Block, int] | None = None
    exchanged: dict[tuple[str, int], Exchange] = field(default_factory=dict)  # (block, index of the receive)
    rings: Circulation = field(init=False)

    def __post_init__(self) -> None:
        self.rings = Circulation(self.plan)

    def fail(self, message: str, code: str = "T741", place: Place | None = None) -> None:
        block, index = place or self.place or (self.role.blocks[0], -1)
        self.findings.append(at(code, message, self.role, block, index))

    # -- forward ------------------------------------------------------------------------------------------------------

    def run(self, pieces: tuple[Piece, ...]) -> None:
        """Forward of all blocks first: a gradient's completeness needs all consumers."""
        listed = [(piece.block, n, i) for piece in pieces for n, i in piece.instructions]
        self.exchanged = {place: exchange for piece in pieces for place, exchange in piece.exchanges.items()}
        for block, index, instruction in listed:
            self.place = (block, index)
            self.forward(instruction)
        for block, index, instruction in listed:
            self.place = (block, index)
            self.backward(instruction)

    def forward(self, instruction: Instruction) -> None:
        opcode = instruction.opcode
        if opcode == "forward":
            self.forward_unit(instruction)
        elif opcode == "load_batch":
            self.sources[bare(instruction.writes[0])] = str(instruction.attribute("what"))
        elif in_ring(instruction):
            if opcode == "recv" and self.is_forward(instruction.writes[0]):
                self.pass_on()
        elif opcode == "recv" and self.is_forward(instruction.writes[0]):
            self.received[bare(instruction.writes[0])] = int(instruction.attribute("peer"))
        elif opcode == "send" and not instruction.reads[0].startswith("d."):
            name = bare(instruction.reads[0])
            self.sent[name] = int(instruction.attribute("peer"))
            self.consume(name, (f"send {instruction.attribute('peer')}", 0))
        elif opcode in _COLLECTIVES and instruction.reads and self.is_forward(instruction.writes[0]):
            source, result = bare(instruction.reads[0]), bare(instruction.writes[0])
            self.moves[result] = (source, instruction)
            self.consume(source, (f"to {result}", 0))
        elif opcode == "loss":
            name = bare(instruction.reads[0])
            self.losses.append(name)
            self.consume(name, ("loss", 0))

    def exchange(self) -> Exchange | None:
        """The exchange whose receive stands here; proof (b) says when there is none."""
        assert self.place is not None
        return self.exchanged.get((self.place[0].name, self.place[1]))

    def pass_on(self) -> None:
        found = self.exchange()
        if found is not None and self.place is not None:
            source, result = bare(found.source), bare(found.result)
            self.moves[result] = (source, self.place[0].instructions[found.sent])
            self.consume(source, (f"to {result}", 0))
            self.rings.forward(source, result, found.group, found.offset)

    def is_forward(self, name: str) -> bool:
        return not name.startswith(("d.", "r.", "b."))

    def consume(self, name: str, edge: Edge) -> None:
        self.consumers.setdefault(name, []).append(edge)

    def forward_unit(self, instruction: Instruction) -> None:
        unit = instruction.unit
        if unit in self.forwards:
            self.fail(f"{unit} runs forward twice for one micro-batch", "T740")
            return
        self.forwards[unit] = instruction
        assert self.place is not None
        self.places[unit] = self.place
        segment = self.segment(unit)
        wrong = self.rings.merges(segment, instruction)
        if wrong:
            self.fail(wrong)
        for number, (formal, register) in enumerate(zip(segment.inputs, instruction.reads)):
            if formal in segment.differentiable:
                self.consume(bare(register), (unit, number))

    def segment(self, unit: str) -> Segment:
        return self.plan.segment_table[parse_unit(unit)[0]]

    def edges(self, name: str) -> frozenset[Edge]:
        """Consumers of a value that return a gradient; what only feeds statistics returns none."""
        edges = self.consumers.get(name, ())
        if not any(edge[0].startswith("to ") for edge in edges):
            return frozenset(edges)
        return frozenset(edge for edge in edges if not edge[0].startswith("to ") or self.returns(edge[0][3:], {name}))

    def returns(self, name: str, seen: set[str]) -> bool:
        """Whether any consumer of a value, through collectives, returns a gradient."""
        if name in seen:
            return False
        seen.add(name)
        edges = self.consumers.get(name, ())
        if any(not edge.startswith("to ") for edge, _ in edges):
            return True
        return any(self.returns(edge[3:], seen) for edge, _ in edges)

    # -- recompute ----------------------------------------------------------------------------------------------------

    def image(self, register: str) -> str:
        """The forward register whose value a register holds: itself, run again, or back from the host."""
        name = bare(register).removeprefix(BACK)
        return self.images.get(name, name)

    def recompute(self, instruction: Instruction) -> None:
        first = self.forwards.get(instruction.unit)
        if first is None:
            self.fail(f"{instruction.unit} is recomputed but never ran forward", "T740")
            return
        segment = self.segment(instruction.unit)
        registers = dict(zip(segment.inputs, map(bare, first.reads)))
        registers |= dict(zip(segment.outputs, map(bare, first.writes)))
        again = segment.rebuild(str(instruction.attribute("tier")))
        if again is None:
            return  # the proof of layouts says so
        if [self.image(r) for _, r in zip(again.reads, instruction.reads)] != [registers[v] for v in again.reads]:
            self.fail(f"{instruction.unit} is recomputed from other values than it was computed from")
        for formal, written in zip(again.writes, instruction.writes):
            self.images[bare(written)] = registers[formal]

    def move_again(self, instruction: Instruction) -> None:
        """A collective on recomputed values repeats one of the forward."""
        source = self.image(instruction.reads[0])
        wanted = (instruction.opcode, instruction.group, instruction.attributes)
        for edge, _ in self.consumers.get(source, ()):
            result = edge.removeprefix("to ")
            first = self.moves[result][1] if result in self.moves else None
            if first is not None and (first.opcode, first.group, first.attributes) == wanted:
                self.images[bare(instruction.writes[0])] = result
                return
        self.fail(f"recomputed `{bare(instruction.writes[0])}` repeats no collective of the forward")

    # -- backward -----------------------------------------------------------------------------------------------------

    def backward(self, instruction: Instruction) -> None:
        opcode = instruction.opcode
        if opcode == "recompute":
            self.recompute(instruction)
        elif opcode in ("backward", "backward_input"):
            self.backward_unit(instruction)
        elif opcode == "backward_weight":
            self.again(instruction)
        elif opcode == "loss" and instruction.writes:
            self.gradients[bare(instruction.writes[0])] = Gradient(bare(instruction.reads[0]), frozenset({("loss", 0)}))
        elif in_ring(instruction):
            if opcode == "recv" and not self.is_forward(instruction.writes[0]):
                self.come_around()
        elif opcode == "recv" and not self.is_forward(instruction.writes[0]):
            self.receive(instruction)
        elif opcode == "send" and instruction.reads[0].startswith("d."):
            self.give_back(instruction)
        elif opcode == "add":
            self.add(instruction)
        elif opcode in _COLLECTIVES and instruction.reads:
            if instruction.reads[0].startswith("d."):
                self.move_back(instruction)
            elif instruction.writes[0].startswith("r."):
                self.move_again(instruction)

    def come_around(self) -> None:
        """A gradient goes home against the ring; a value that is not kept comes around again."""
        found = self.exchange()
        if found is None:
            return
        source, result = bare(found.source), bare(found.result)
        if not source.startswith("d."):
            again = self.rings.again(self.image(source), found.group, found.offset)
            if again is None:
                self.fail(f"`{result}` is nothing that came by in the forward")
            else:
                self.images[result] = again
            return
        held = self.known(source)
        if held is None:
            return
        origin, first = self.moves.get(held.value, ("", None))
        if first is None or first.group != found.group or first.attribute("peer") != -found.offset:
            self.fail(f"`{source}` goes {found.offset} ranks on, `{held.value}` did not come from there")
        elif self.whole(source, held.value):
            self.gradients[result] = Gradient(origin, frozenset({(f"to {held.value}", 0)}))

    def receive(self, instruction: Instruction) -> None:
        """The gradient of a value that was sent comes from where the value went."""
        name, peer = bare(instruction.writes[0]), int(instruction.attribute("peer"))
        value = name.removeprefix("d.")
        if self.sent.get(value) != peer:
            self.fail(f"`{name}` comes from offset {peer}, but `{value}` was not sent there")
            return
        self.gradients[name] = Gradient(value, frozenset({(f"send {peer}", 0)}))

    def give_back(self, instruction: Instruction) -> None:
        name, peer = bare(instruction.reads[0]), int(instruction.attribute("peer"))
        value = name.removeprefix("d.")
        if self.received.get(value) != peer:
            self.fail(f"`{name}` goes to offset {peer}, but `{value}` did not come from there")
            return
        if self.whole(name, value):
            self.returned.add(value)

    def known(self, name: str) -> Gradient | None:
        found = self.gradients.get(name)
        if found is None:
            self.fail(f"`{name}` holds no gradient here")
        return found

    def as_of(self, found: Gradient, value: str) -> Gradient:
        """The same gradient seen through a free conversion: the sole consumer of `value` passes it on unchanged."""
        move = self.moves.get(found.value)
        if found.value != value and move and move[0] == value and found.edges == self.edges(found.value):
            return Gradient(value, frozenset({(f"to {found.value}", 0)}))
        return found

    def whole(self, name: str, value: str) -> bool:
        """Whether a register is the whole gradient of a value; says what is missing if not."""
        found = self.known(name)
        if found is None:
            return False
        found = self.as_of(found, value)
        wanted = self.edges(value)
        if found.value == value and found.edges == wanted:
            return True
        if found.value != value:
            self.fail(f"`{name}` is a gradient of `{found.value}`, here that of `{value}` is due")
        else:
            lacking = ", ".join(sorted(edge[0] for edge in wanted - found.edges))
            self.fail(f"`{name}` lacks what `{value}` gave to {lacking or 'nobody'}", "T742")
        return False

    def backward_unit(self, instruction: Instruction) -> None:
        unit = instruction.unit
        first = self.forwards.get(unit)
        if first is None:
            self.fail(f"{unit} runs backward but never ran forward", "T740")
            return
        self.again(instruction)
        segment = self.segment(unit)
        registers = dict(zip(segment.inputs, map(bare, first.reads)))
        registers |= dict(zip(segment.outputs, map(bare, first.writes)))
        for formal in segment.outputs:
            if (formal in dict(segment.finals)) != (registers[formal] in self.rings.becomes):
                self.fail(f"`{registers[formal]}` is partial in the program or in {segment.name}, not in both")
            registers[segment.final(formal)] = self.rings.final(registers[formal])
        reads = list(map(bare, instruction.reads))
        for formal in gradient_outputs(segment):
            self.whole(reads.pop(0), registers[formal])
        carried: dict[str, Gradient] = {}
        for formal in filter(None, str(instruction.attribute("carry")).split(",")):
            found = self.known(reads.pop(0))
            if found is not None:
                carried[formal] = self.as_of(found, registers[formal])
        for formal in (*segment.kept_inputs, *segment.kept_outputs):
            if self.image(reads.pop(0)) != registers[formal]:
                self.fail(f"{unit} was run on `{registers[formal]}`, its backward reads another value as {formal}")
        for formal, written in zip(gradient_inputs(segment), instruction.writes):
            edge = (unit, segment.inputs.index(formal))
            self.contribute(bare(written), registers[formal], edge, carried.get(formal))

    def contribute(self, name: str, value: str, edge: Edge, carried: Gradient | None) -> None:
        edges = {edge}
        if carried is not None:
            if carried.value != value:
                self.fail(f"a gradient of `{carried.value}` is carried into that of `{value}`")
            elif edge in carried.edges:
                self.fail(f"`{name}` counts the contribution of {edge[0]} twice", "T742")
            edges |= carried.edges
        self.gradients[name] = Gradient(value, frozenset(edges))

    def again(self, instruction: Instruction) -> None:
        self.backwards.setdefault(instruction.unit, []).append(instruction.opcode)

    def add(self, instruction: Instruction) -> None:
        a, b = (self.known(bare(name)) for name in instruction.reads)
        if a is None or b is None:
            return
        if a.value != b.value:
            a, b = self.as_of(a, b.value), self.as_of(b, a.value)
        if a.value != b.value or a.edges & b.edges:
            twice = a.value == b.value
            self.fail(
                f"one contribution to the gradient of `{a.value}` is added twice"
                if twice
                else f"gradients of `{a.value}` and `{b.value}` are added",
                "T742" if twice else "T741",
            )
        self.gradients[bare(instruction.writes[0])] = Gradient(a.value, a.edges | b.edges)

    def move_back(self, instruction: Instruction) -> None:
        """A collective on a gradient: the transpose of one of the forward, or the sum that a free conversion owes."""
        name = bare(instruction.reads[0])
        found = self.known(name)
        if found is None:
            return
        result = bare(instruction.writes[0])
        move = self.moves.get(found.value)
        types = self.plan.types
        proper = types[type_name(name)].layout == dual(types[type_name(found.value)].layout)
        if not proper:
            self.gradients[result] = found
            return
        if move is None:
            self.fail(f"`{found.value}` came of no collective, its gradient needs none")
            return
        source, first = move
        if instruction.opcode not in _TRANSPOSE[first.opcode] or instruction.group != first.group:
            self.fail(f"the transpose of {first.opcode} over {first.group} is another collective than this")
        if self.whole(name, found.value):
            self.gradients[result] = Gradient(source, frozenset({(f"to {found.value}", 0)}))
