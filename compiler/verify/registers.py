"""Proof (a): registers are written before they are read, once, freed once, and none is left; only `wait` completes a
pending one; what a pending instruction borrows is neither freed nor updated; buffers are not read under an update.

A block is checked once (`block_registers`); an order is then an automaton over bit masks, one set of masks per
micro-batch: a call costs a few integer operations however long its block is. The step begins and ends with nothing
pending and no register alive, so what holds for one step holds for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from titan.compiler.plan.alike import Like
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.program import Plan, Role
from titan.compiler.verify.block_registers import GONE, PENDING, VALUE, Masks, Outline, outline, split
from titan.compiler.verify.findings import MOST, Finding, at, found_alike
from titan.compiler.verify.threads import STEP, Named, Pieces, StepThread

_DEMANDS = {
    VALUE: ("T710", "is read but holds no value here: not written yet, or freed"),
    PENDING: ("T714", "is waited for but nothing is pending under that name"),
    GONE: ("T711", "is written a second time in a step"),
}


@dataclass
class _State:
    """Registers of one micro-batch."""

    value: int = 0
    pending: int = 0
    written: int = 0
    shared: int = 0
    exclusive: int = 0


@dataclass
class _Automaton:
    role: Role
    outlines: dict[str, Outline]
    bits: dict[str, int]
    states: dict[int, _State] = field(default_factory=dict)
    # pending register (micro-batch, base) -> what it borrows: (micro-batch, base, exclusively)
    lent: dict[tuple[int, str], list[tuple[int, str, bool]]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def call(self, position: int, seen: Outline, batches: Sequence[int]) -> None:
        """One call; `batches`: the micro-batch of each of the outline's masks."""
        states, borrowed = self.states, bool(self.lent)
        for batch, (symbol, masks) in zip(batches, seen.masks.items(), strict=True):
            state = states.get(batch)
            if state is None:
                state = states[batch] = _State()
            if masks.touched:
                self.step(position, seen, symbol, masks, state)
            met = masks.changes & (state.shared | state.exclusive) | masks.reads & state.exclusive if borrowed else 0
            if met:
                self.borrowed(position, seen, symbol, met, dict(zip(seen.masks, batches, strict=True)))
        if seen.waits or seen.lent:
            named = dict(zip(seen.masks, batches, strict=True))
            for token in seen.waits:
                base, symbol = split(token)
                self.release(named[symbol], base)
            for token in seen.lent:
                self.lend(seen, token, named)

    def meets_itself(self, position: int, seen: Outline) -> None:
        message = "a micro-batch meets itself: under two names of it the block touches one register"
        self.findings.append(at("T711", message, self.role, seen.block, -1, position))

    def step(self, position: int, seen: Outline, symbol: str, masks: Masks, state: _State) -> None:
        demands = (
            (VALUE, masks.value & ~state.value),
            (PENDING, masks.pending & ~state.pending),
            (GONE, masks.absent & state.written),
        )
        for kind, wrong in demands:
            if wrong:
                self.demand(position, seen, symbol, kind, wrong)
        state.value = state.value & ~masks.touched | masks.value_after
        state.pending = state.pending & ~masks.touched | masks.pending_after
        state.written |= masks.absent

    def demand(self, position: int, seen: Outline, symbol: str, kind: str, wrong: int) -> None:
        code, rule = _DEMANDS[kind]
        for base in self.names(wrong):
            name = f"{base}:{symbol}" if symbol else base
            index = seen.first[name, kind]
            if kind is VALUE and seen.block.instructions[index].opcode == "free":
                code, rule = "T712", "is freed but holds no value here"
            self.findings.append(at(code, f"`{name}` {rule}", self.role, seen.block, index, position))

    def names(self, mask: int) -> list[str]:
        return [name for name, bit in self.bits.items() if mask >> bit & 1] if mask else []

    def borrowed(self, position: int, seen: Outline, symbol: str, met: int, batches: dict[str, int]) -> None:
        """Exact look at a call that touches the borrowed names in `met`: the borrower's wait must come first,
        in this block."""
        waits = {(batches[split(t)[1]], split(t)[0]): index for t, index in seen.waits.items()}
        for index, name, changes in seen.accesses:
            base, of = split(name)
            if of != symbol or not met >> self.bits[base] & 1:
                continue
            for token, names in self.lent.items():
                if waits.get(token, index) < index:
                    continue
                if any((m, b) == (batches[of], base) and (changes or e) for m, b, e in names):
                    self.conflict(position, seen, index, name, token)

    def conflict(self, position: int, seen: Outline, index: int, name: str, token: tuple[int, str]) -> None:
        free = seen.block.instructions[index].opcode == "free"
        what = "freed" if free else "used"
        message = f"`{name}` is {what} while `{token[1]}?` borrows it: its wait has not come"
        self.findings.append(at("T715" if free else "T716", message, self.role, seen.block, index, position))

    def lend(self, seen: Outline, token: str, batches: dict[str, int]) -> None:
        base, symbol = split(token)
        names = []
        for exclusive, borrowed in zip((False, True), seen.lent[token], strict=True):
            for name in borrowed:
                inner, of = split(name)
                names.append((batches[of], inner, exclusive))
        self.lent[batches[symbol], base] = names
        self.mark(names)

    def mark(self, names: list[tuple[int, str, bool]]) -> None:
        for batch, base, exclusive in names:
            state = self.states.setdefault(batch, _State())
            bit = 1 << self.bits.setdefault(base, len(self.bits))
            if exclusive:
                state.exclusive |= bit
            else:
                state.shared |= bit

    def release(self, batch: int, base: str) -> None:
        names = self.lent.pop((batch, base), None)
        if not names:
            return
        for other, inner, _ in names:
            state, bit = self.states[other], 1 << self.bits[inner]
            state.shared &= ~bit
            state.exclusive &= ~bit
        touched = {entry[:2] for entry in names}
        for rest in self.lent.values():  # names with a second borrower stay borrowed
            for entry in rest:
                if entry[:2] in touched:
                    self.mark([entry])

    def close(self, order: str) -> None:
        """Nothing may be left: neither values nor pending registers."""
        for batch, state in sorted(self.states.items()):
            where = f"of micro-batch {batch}" if batch != STEP else "of the step"
            for names, what in ((state.value, "never freed"), (state.pending, "never waited for")):
                for base in self.names(names):
                    self.findings.append(self.left(f"`{base}` {where} is {what} in order {order}", base))

    def left(self, message: str, base: str) -> Finding:
        for seen in self.outlines.values():
            for index, instruction in enumerate(seen.block.instructions):
                if any(split(w.removesuffix("?"))[0] == base for w in instruction.writes):
                    return at("T713", message, self.role, seen.block, index)
        return Finding("T713", message, self.role.pipeline)


def _apart(seen: Outline, arguments: tuple[int, ...]) -> bool:
    """Whether parameters of a block that stand for one micro-batch touch registers of their own only."""
    met: dict[int, int] = {}
    for symbol, argument in zip(seen.block.parameters, arguments, strict=True):
        masks = seen.masks[symbol]
        names = masks.touched | masks.reads | masks.changes
        if met.get(argument, 0) & names:
            return False
        met[argument] = met.get(argument, 0) | names
    return True


class _Kind:
    """The blocks of roles that are alike: their outlines, and the threads that were walked without a finding."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.bits: dict[str, int] = {}
        self.outlines: dict[str, Outline] = {}
        self.findings: list[Finding] = []
        for block in role.blocks:
            self.outlines[block.name], found = outline(role, block, self.bits)
            self.findings += found
        self.pieces = Pieces(self.outlines)
        self.proven: set[tuple[int, ...]] = set()

    def order(self, like: Like, name: str, named: Named, step: StepThread) -> list[Finding]:
        """Findings of an order of one of the roles, whose blocks are `named`; `step`: the thread of the step."""
        threads = like.role.threads[name]
        alone = self.pieces.apart and threads.apart
        if alone and all(self.holds(name, thread) for thread in (tuple(step.parts), *named.threads(threads))):
            return []
        automaton = _Automaton(self.role, self.outlines, self.bits)
        outlines = {mine: self.outlines[block.name] for mine, block in like.blocks.items()}
        for position, call in enumerate(like.role.order(name)):
            seen, arguments = outlines[call.block], call.arguments
            if len(arguments) > 1 and len(set(arguments)) != len(arguments) and not _apart(seen, arguments):
                automaton.meets_itself(position, seen)
            else:
                automaton.call(position, seen, (STEP, *arguments))
            if len(automaton.findings) >= MOST:
                break
        else:
            automaton.close(name)
        return automaton.findings

    def holds(self, order: str, thread: tuple[int, ...]) -> bool:
        """Whether a thread alone is without findings."""
        if thread not in self.proven:
            automaton = _Automaton(self.role, self.outlines, self.bits)
            for position, number in enumerate(thread):
                automaton.call(position, self.pieces.parts[number], (STEP,))
            automaton.close(order)
            if automaton.findings:
                return False
            self.proven.add(thread)
        return True


def _role(like: Like, kind: _Kind) -> list[Finding]:
    found: dict[str, list[Finding]] = {}
    steps: dict[str, StepThread] = {}
    named = kind.pieces.named({name: block.name for name, block in like.blocks.items()})
    for name, before in like.role.legs:
        done = len(like.role.order(before)) if before else 0
        step = steps[name] = steps.get(before) or StepThread(kind.pieces, named.step)
        found[name] = kind.order(like, name, named, step.add(like.role.called(name)[done:]))
    return [finding for name, _ in like.role.orders for finding in found[name]]


def registers(plan: Plan) -> list[Finding]:
    """Findings of proof (a) over all roles and orders."""
    return found_alike(plan, _registers)


def _registers(likes: tuple[Like, ...]) -> list[Finding]:
    kinds: dict[int, _Kind] = {}
    found: list[Finding] = []
    for like in likes:
        stage = like.first.pipeline
        kind = kinds[stage] = kinds.get(stage) or _Kind(like.first)
        found += kind.findings or _role(like, kind)
    return found
