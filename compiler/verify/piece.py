"""What a block does for one micro-batch."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.program import Block
from titan.compiler.verify.rings import Exchange, exchanges

USUAL = "i"  # what most blocks call their micro-batch
_BESIDE = frozenset(  # what makes no value and no gradient of a micro-batch
    ("wait", "free", "offload", "prefetch", "watermark", "report", "grad_norm", "optimizer_step", "zero_grad")
)
_ON_BUFFER = frozenset(("unshard", "reduce_grad"))  # neither does this where no register is read


@dataclass(frozen=True)
class Piece:
    """A block and which of its parameters is the micro-batch that is followed."""

    block: Block
    symbol: str

    @cached_property
    def instructions(self) -> list[tuple[int, Instruction]]:
        """Those that make values or gradients of one micro-batch: of all of a block, or of its half of a pair."""
        listed = [
            (n, i)
            for n, i in enumerate(self.block.instructions)
            if i.opcode not in _BESIDE and (i.reads or i.opcode not in _ON_BUFFER)
        ]
        if len(self.block.parameters) < 2:
            return listed
        mark = (f":{self.symbol}", f":{self.symbol}?")
        return [(n, i) for n, i in listed if any(name.endswith(mark) for name in (*i.writes, *i.reads))]

    @cached_property
    def exchanges(self) -> dict[tuple[str, int], Exchange]:
        """By block and index of the receive."""
        return {(self.block.name, found.received): found for found in exchanges(self.block)[0]}

    @cached_property
    def does(self) -> list[object]:
        """What is done for the micro-batch, whatever it is called and beside whatever else: its instructions, and what
        exchanges of a ring pass on."""
        found: list[object] = []
        for index, instruction in self.instructions:
            passed = self.exchanges.get((self.block.name, index))
            if passed is not None:
                found.append((passed.group, passed.offset, *map(self._called, (passed.source, passed.result))))
            found.append(instruction if self.symbol == USUAL else self._renamed(instruction))
        return found

    def _renamed(self, i: Instruction) -> Instruction:
        writes, reads, updates = (tuple(map(self._called, names)) for names in (i.writes, i.reads, i.updates))
        attributes = tuple((k, self._called(v) if isinstance(v, str) else v) for k, v in i.attributes)
        return replace(i, writes=writes, reads=reads, updates=updates, attributes=attributes)

    def _called(self, name: str) -> str:
        base, mark, symbol = name.partition(":")
        return f"{base}:{USUAL}{symbol[len(self.symbol) :]}" if mark and symbol.rstrip("?") == self.symbol else name
