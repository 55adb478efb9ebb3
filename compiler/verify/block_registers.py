"""One block seen from outside: which registers it finds in which state, and in which state it leaves them.

Inside the block every access is checked here. What depends on earlier calls is left as demands: bit masks over the
role's register names, one set per micro-batch parameter of the block.
"""

from __future__ import annotations

from dataclasses import field

from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.program import Block, Role
from titan.compiler.verify.findings import Finding, at

VALUE, PENDING, GONE = "value", "pending", "gone"
Borrowing = tuple[tuple[str, ...], tuple[str, ...]]  # names read (shared), names updated (exclusive)


@dataclass
class Masks:
    """Demands and effects on the registers of one micro-batch: bit n stands for the role's n-th name."""

    value: int = 0  # must hold a value at entry
    pending: int = 0  # must be pending at entry
    absent: int = 0  # must never have been written
    touched: int = 0
    value_after: int = 0
    pending_after: int = 0
    reads: int = 0  # read although not borrowed inside: must not be under update by an earlier call
    changes: int = 0  # freed or updated: must not be borrowed by an earlier call


@dataclass
class Outline:
    """A block from outside. `first` finds the instruction that makes a demand; `waits` the index of the wait of each
    pending register that an earlier call issued; `lent` what is borrowed by instructions still pending at the end."""

    block: Block
    masks: dict[str, Masks]
    first: dict[tuple[str, str], int]
    waits: dict[str, int]
    lent: dict[str, Borrowing]
    accesses: list[tuple[int, str, bool]]  # (index, name, changes it) of the names in `reads` and `changes`


def split(name: str) -> tuple[str, str]:
    """`x.l5:i` -> (`x.l5`, `i`)."""
    base, _, symbol = name.partition(":")
    return base, symbol


@dataclass
class _Walk:
    role: Role
    block: Block
    buffers: frozenset[str]
    findings: list[Finding] = field(default_factory=list)
    state: dict[str, str] = field(default_factory=dict)
    entry: dict[str, str] = field(default_factory=dict)
    first: dict[tuple[str, str], int] = field(default_factory=dict)
    lent: dict[str, Borrowing] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    exclusive: dict[str, int] = field(default_factory=dict)
    waits: dict[str, int] = field(default_factory=dict)
    accesses: list[tuple[int, str, bool]] = field(default_factory=list)

    def fail(self, code: str, index: int, message: str) -> None:
        self.findings.append(at(code, message, self.role, self.block, index))

    def run(self) -> None:
        for index, instruction in enumerate(self.block.instructions):
            opcode = instruction.opcode
            if opcode == "wait":
                self.wait(index, instruction)
            elif opcode == "free":
                for name in instruction.reads:
                    self.free(index, name)
            else:
                for name in instruction.reads:
                    self.read(index, name)
                for name in instruction.updates:
                    self.change(index, name)
                self.write(index, instruction)

    def require(self, index: int, name: str, wanted: str) -> str:
        """State of a name; a name not seen yet must be `wanted` at entry."""
        found = self.state.get(name)
        if found is None:
            self.entry[name] = self.state[name] = found = wanted
            self.first[name, wanted] = index
        return found

    def read(self, index: int, name: str) -> None:
        if name in self.buffers:
            self.accesses.append((index, name, False))
            if name in self.exclusive:
                self.fail("T716", index, f"`{name}` is read while an instruction that updates it is not waited for")
            return
        if name.endswith("?"):
            self.fail("T714", index, f"`{name}` is pending: only `wait` turns it into a value")
            return
        found = self.state.get(name) or self.require(index, name, VALUE)
        if found is PENDING:
            self.fail("T714", index, f"`{name}` is read before the wait for it")
        elif found is GONE:
            self.fail("T710", index, f"`{name}` is read after it was freed")

    def change(self, index: int, name: str) -> None:
        """A buffer is updated, or a register that holds a whole gradient."""
        if name not in self.buffers and (self.state.get(name) or self.require(index, name, VALUE)) is not VALUE:
            self.fail("T710", index, f"`{name}` is added to but holds no value here")
        self.accesses.append((index, name, True))
        if name in self.exclusive or name in self.shared:
            self.fail("T716", index, f"`{name}` is updated while an instruction that uses it is not waited for")

    def write(self, index: int, instruction: Instruction) -> None:
        pending = instruction.row.asynchronous
        for name in instruction.writes:
            if name.endswith("?") != pending:
                rule = "must write a pending register" if pending else "cannot write a pending register"
                self.fail("T714", index, f"{instruction.opcode} {rule}, not `{name}`")
                continue
            bare = name[:-1] if pending else name
            if self.state.get(bare) is not None:
                self.fail("T711", index, f"`{bare}` is written a second time in a step")
            else:
                self.entry[bare] = GONE
                self.first[bare, GONE] = index
            self.state[bare] = PENDING if pending else VALUE
            if pending:
                self.lend(bare, (() if instruction.row.copies else instruction.reads, instruction.updates))

    def lend(self, token: str, names: Borrowing) -> None:
        self.lent[token] = names
        for table, borrowed in zip((self.shared, self.exclusive), names, strict=True):
            for name in borrowed:
                table[name] = table.get(name, 0) + 1

    def release(self, token: str) -> None:
        for table, borrowed in zip((self.shared, self.exclusive), self.lent.pop(token), strict=True):
            for name in borrowed:
                table[name] -= 1
                if not table[name]:
                    del table[name]

    def wait(self, index: int, instruction: Instruction) -> None:
        name = instruction.reads[0]
        bare = name.removesuffix("?")
        if bare == name:
            self.fail("T714", index, f"`{name}` is not pending: there is nothing to wait for")
            return
        if self.require(index, bare, PENDING) is not PENDING:
            self.fail("T714", index, f"`{name}` is waited for although nothing is pending under that name")
            return
        if bare in self.lent:
            self.release(bare)
        else:
            self.waits[bare] = index
        token = bare.startswith(("t.", "u."))
        if instruction.writes != (() if token else (bare,)):
            rule = "nothing" if token else f"`{bare}`"
            self.fail("T714", index, f"a wait for `{name}` writes {rule}")
        self.state[bare] = GONE if token else VALUE

    def free(self, index: int, name: str) -> None:
        if name in self.buffers or name.endswith("?"):
            self.fail("T712", index, f"`{name}` is no register with a value: it cannot be freed")
            return
        found = self.state.get(name) or self.require(index, name, VALUE)
        if found is not VALUE:
            self.fail(
                "T712", index, f"`{name}` is freed " + ("before its wait" if found is PENDING else "a second time")
            )
        if name in self.shared:
            self.fail("T715", index, f"`{name}` is freed while a pending instruction borrows it")
        self.accesses.append((index, name, True))
        self.state[name] = GONE


def outline(role: Role, block: Block, bits: dict[str, int]) -> tuple[Outline, list[Finding]]:
    """Checks a block alone and says what it demands of the calls before it. `bits` numbers the role's names."""
    walk = _Walk(role, block, frozenset(b.name for b in role.buffers))
    walk.run()
    masks = {symbol: Masks() for symbol in ("", *block.parameters)}
    for name, entry in walk.entry.items():
        base, symbol = split(name)
        bit = 1 << bits.setdefault(base, len(bits))
        found = masks[symbol]
        found.touched |= bit
        if entry is VALUE:
            found.value |= bit
        elif entry is PENDING:
            found.pending |= bit
        else:
            found.absent |= bit
        after = walk.state[name]
        if after is VALUE:
            found.value_after |= bit
        elif after is PENDING:
            found.pending_after |= bit
    for _, name, changes in walk.accesses:
        base, symbol = split(name)
        bit = 1 << bits.setdefault(base, len(bits))
        if changes:
            masks[symbol].changes |= bit
        else:
            masks[symbol].reads |= bit
    return Outline(block, masks, walk.first, walk.waits, walk.lent, walk.accesses), walk.findings
