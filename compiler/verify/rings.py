"""Rings: values passed around the ranks of one program, and attention over what comes by.

All ranks of a role run the same list, so what a rank receives from the one before it is what that one sends by the same
list: the n-th receive of a stream from offset -k takes the n-th send of that stream to offset k. A value that has gone
j ranks is named by where it started and j, modulo the ring: so what comes around again in backward is recognised.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from functools import lru_cache

from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.instruction import Instruction, base_name, type_name
from titan.compiler.plan.layout import sharded_by
from titan.compiler.plan.listing import text
from titan.compiler.plan.mask import sees
from titan.compiler.plan.program import Block, Plan, Role
from titan.compiler.plan.segment import Call, Segment
from titan.compiler.plan.sequence import held
from titan.compiler.verify.findings import Finding, at

bare = base_name


def in_ring(instruction: Instruction) -> bool:
    """Whether a transfer stays among the ranks of one program."""
    return instruction.opcode in ("send", "recv") and instruction.group != "pipeline"


@dataclass(frozen=True, slots=True)
class Exchange:
    """A send and the receive that takes it; `offset` is the number of ranks that the value goes on."""

    sent: int
    received: int
    source: str
    result: str
    group: str
    offset: int


def exchanges(block: Block) -> tuple[tuple[Exchange, ...], tuple[int, ...]]:
    """The exchanges of a block, and the indices of sends and receives without another half."""
    halves: dict[tuple[str, str, int], tuple[list[int], list[int]]] = {}
    for index, instruction in enumerate(block.instructions):
        if instruction.stream and in_ring(instruction):
            peer, receives = int(instruction.attribute("peer")), instruction.opcode == "recv"
            key = (instruction.group, instruction.stream, -peer if receives else peer)
            halves.setdefault(key, ([], []))[receives].append(index)
    found: list[Exchange] = []
    alone: list[int] = []
    for (group, _, offset), (sent, received) in halves.items():
        for s, r in zip(sent, received, strict=False):
            source, result = block.instructions[s].reads[0], block.instructions[r].writes[0]
            found.append(Exchange(s, r, source, result, group, offset))
        alone += (*sent[len(received) :], *received[len(sent) :])
    return tuple(found), tuple(alone)


def ring_matching(plan: Plan, role: Role) -> Iterator[Finding]:
    """Both halves of every exchange are there, in one block, of one type and micro-batch."""
    for block in role.blocks:
        found, alone = exchanges(block)
        for index in alone:
            yield at("T722", "the other half of this exchange is missing in the block", role, block, index)
        for exchange in found:
            size = plan.mesh.size(exchange.group)
            if len(plan.mesh.resolve(exchange.group)) != 1 or exchange.offset % size == 0:
                yield at("T722", f"{exchange.offset} ranks on is no other rank of a ring", role, block, exchange.sent)
            types = [plan.types[type_name(n)] for n in (exchange.source, exchange.result)]
            batches = [n.rstrip("?").partition(":")[2] for n in (exchange.source, exchange.result)]
            if types[0] != types[1] or batches[0] != batches[1]:
                message = f"`{bare(exchange.result)}` is received where `{bare(exchange.source)}` is sent"
                yield at("T722", message, role, block, exchange.received)


def ring_progress(role: Role) -> Iterator[Finding]:
    """No rank waits for one half of an exchange before it issues the other: its neighbours stand where it stands."""
    for block in role.blocks:
        found, _ = exchanges(block)
        waits = {i.reads[0]: n for n, i in enumerate(block.instructions) if i.opcode == "wait"} if found else {}
        for exchange in found:
            issued = max(exchange.sent, exchange.received)
            for half in (exchange.sent, exchange.received):
                waited = waits.get(block.instructions[half].writes[0], len(block.instructions))
                if waited < issued:
                    message = "deadlock: every rank of the ring waits here before it issues the other half"
                    yield at("T730", message, role, block, waited)


@dataclass
class Circulation:
    """What has gone how far: `places` maps a register of the forward to (where it started, ranks that it has gone)."""

    plan: Plan
    places: dict[str, tuple[str, int]] = field(default_factory=dict)
    registers: dict[tuple[str, int], str] = field(default_factory=dict)
    becomes: dict[str, str] = field(default_factory=dict)  # partial result -> what it is merged into

    def place(self, register: str) -> tuple[str, int]:
        return self.places.get(register, (register, 0))

    def moved(self, source: str, group: str, offset: int) -> tuple[str, int]:
        origin, gone = self.place(source)
        return origin, (gone + offset) % self.plan.mesh.size(group)

    def forward(self, source: str, result: str, group: str, offset: int) -> None:
        self.places[result] = place = self.moved(source, group, offset)
        self.registers.setdefault(place, result)

    def again(self, source: str, group: str, offset: int) -> str | None:
        """The register of the forward that holds what comes by when `source` is passed on; None when none does."""
        origin, gone = self.moved(source, group, offset)
        return self.registers.get((origin, gone)) if gone else origin

    def final(self, register: str) -> str:
        while register in self.becomes:
            register = self.becomes[register]
        return register

    def merges(self, segment: Segment, instruction: Instruction) -> str:
        """Notes what a segment goes on accumulating; the sentence when a partial result is merged twice."""
        reads = dict(zip(segment.inputs, map(bare, instruction.reads)))
        writes = dict(zip(segment.outputs, map(bare, instruction.writes)))
        for call in segment.body:
            named = dict(zip(call.row.operands + call.row.results, call.operands + call.results, strict=True))
            for partial, result in call.row.accumulates:
                register = reads.get(named[partial])
                if register is None or named[result] not in writes:
                    return f"{call.operator} must stand alone: its {partial} and {result} are registers"
                if register in self.becomes:
                    return f"`{register}` is merged twice"
                self.becomes[register] = writes[named[result]]
        return ""

    def steps(self, forwards: dict[str, Instruction], segments: dict[str, Segment]) -> Iterator[tuple[str, str]]:
        """(unit, sentence) wherever the steps of a ring are not those of one attention over all keys."""
        written: dict[str, tuple[str, Call, dict[str, str]]] = {}
        for unit, instruction in forwards.items():
            segment = segments[unit]
            if len(segment.body) != 1 or "ring" not in dict(segment.body[0].attributes):
                continue
            call = segment.body[0]
            formals = dict(zip(call.operands + call.results, call.row.operands + call.row.results, strict=True))
            given = (*zip(segment.inputs, instruction.reads), *zip(segment.outputs, instruction.writes))
            registers = {formals[formal]: bare(register) for formal, register in given}
            wrong = self._step(call, registers, written, segment)
            written[registers["out"]] = (unit, call, registers)
            if wrong:
                yield unit, wrong

    def _step(
        self, call: Call, registers: dict[str, str], written: dict[str, tuple[str, Call, dict[str, str]]],
        segment: Segment,
    ) -> str:  # fmt: skip
        given = dict(call.attributes)
        step, ring, mesh = int(given["step"]), int(given["ring"]), self.plan.mesh
        factor = str(given["rank"]).removeprefix("@").removesuffix("*1")
        around = sharded_by(segment.types[call.operands[0]].layout, 1)
        if around != (factor,) or mesh.size(factor) != ring:
            return f"step {step} of a ring of {ring} stands on {factor}, its queries are divided over {around}"
        queries = segment.types[call.operands[0]].shape[1]
        needed = _needed(ring, bool(given["zigzag"]), queries, int(given.get("window", 0)))
        if step not in needed:
            return f"no rank sees any key in step {step} of a ring of {ring}"
        if (step == needed[-1]) != bool(given["final"]):
            return f"step {step} of a ring of {ring} is {'' if given['final'] else 'not '}the final one"
        gone = [self.place(registers[name])[1] for name in ("q", "kv")]
        if gone != [0, step]:
            return f"step {step} of the ring is computed with keys and values that have gone {gone[1]}"
        if (step > 0) != ("partial" in registers):
            return f"step {step} of the ring {'merges nothing' if step else 'has nothing to merge'}"
        if not step:
            return ""
        if registers["partial"] not in written:
            return f"`{registers['partial']}` is no result of a step"
        _, before, held = written[registers["partial"]]
        same = all(self.place(held[n])[0] == self.place(registers[n])[0] for n in ("q", "kv"))
        attributes = {**dict(before.attributes), "step": step, "final": given["final"]}
        if not same or held["lse"] != registers["partial_lse"] or attributes != given:
            return f"step {step} of the ring goes on with another attention"
        if dict(before.attributes)["step"] != needed[needed.index(step) - 1]:
            return f"step {step} of the ring follows step {dict(before.attributes)['step']}"
        return ""


@lru_cache(maxsize=256)
def _needed(ring: int, zigzag: bool, length: int, window: int) -> tuple[int, ...]:
    """Steps in which any rank sees any of the visiting keys, by the positions that the ranks hold."""
    if not window:
        return tuple(range(ring))
    blocks = [held(rank, ring, zigzag, length) for rank in range(ring)]
    near = {(q - k) % ring for q in range(ring) for k in range(ring)
            if any(sees(own, other, window) for own in blocks[q] for other in blocks[k])}  # fmt: skip
    return tuple(sorted(near))


def filled_up(plan: Plan) -> int:
    """Places of a sequence: its tokens, and what fills it up."""
    return int(plan.setting("train.sequence")) + int(plan.setting("train.padding", 0))


def permutations(plan: Plan) -> Iterator[Finding]:
    """Loads, positions and rings agree about the order of the sequence."""
    sequence, found = filled_up(plan), set()
    for role in (like.role for like in plan.alike if like.first is like.role):
        for block in role.blocks:
            for index, i in enumerate(text(block.instructions)):
                if i.opcode == "load_batch" and i.attribute("what") != "count":
                    found.add((int(i.attribute("zigzag", 0)), int(i.attribute("chunk", 0))))
                    if len(found) > 1:
                        yield at("T750", "tokens and labels are loaded in different orders", role, block, index)
                        return
    zigzag, chunk = next(iter(found), (0, 0))
    if zigzag and 2 * zigzag * chunk != sequence:
        yield Finding("T750", f"{2 * zigzag} chunks of {chunk} positions are not the sequence of {sequence}")
    for segment in plan.segments:
        for call in segment.body:
            wrong = _order(call, segment, zigzag, chunk)
            if wrong:
                yield Finding("T750", f"segment {segment.name}: {call.operator} {wrong}")


_PLACED = ("rope", "add_positions", "add_positions_documents", "dropout")


def _order(call: Call, segment: Segment, zigzag: int, chunk: int) -> str:
    given = dict(call.attributes)
    if call.operator in _PLACED and (given.get("zigzag", 0), given.get("chunk", 0)) != (zigzag, chunk):
        return f"takes positions in another order than the tokens are loaded in ({zigzag} ranks, chunks of {chunk})"
    if call.operator in ("attention", "attention_documents") and zigzag and given.get("causal", True):
        return "is causal, but the sequence is not in its natural order"
    if "ring" in given and given["causal"] and (given["ring"] if given["zigzag"] else 0) != zigzag:
        return f"is in zigzag order: {given['zigzag']}, tokens are loaded for {zigzag} ranks"
    return ""
