"""Offload of activations: what a layer's forward leaves for its backward waits in host memory.

Between forwards and backwards the links to the host are idle, and other layers compute. So right after its last use in
the forward a register goes to the host, and ends on the device when the layer after it has been computed; it comes
back `prefetch` layers before the backward that reads it, across blocks too (`overlap`). What the last layer of a chunk
sends ends in a block of its own (`stow`) after the next element of the order, so that this transfer hides too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field, replace

from titan.compiler.passes.blocks import Chunk
from titan.compiler.passes.draft import Draft, stretches
from titan.compiler.passes.overlap import Early
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.instruction import BACK, FROM_HOST, HOST, TO_HOST, Instruction, base_name
from titan.compiler.plan.program import Block, BlockCall
from titan.compiler.strategy import Strategy

BEHIND = 1  # layers that are computed while what a layer has sent is on its way


@dataclass(frozen=True)
class Away:
    """The drafts of a role with what is offloaded, and the blocks that end transfers between them."""

    drafts: tuple[Draft, ...]
    blocks: tuple[Block, ...] = ()

    def order(self, calls: Sequence[BlockCall]) -> tuple[BlockCall, ...]:
        """The calls with those of the blocks between: one element of the order lies between a forward and the end of
        its transfers, where there is one."""
        if not self.blocks:
            return tuple(calls)
        names = {draft.name for draft in self.drafts}
        computing = [n for n, call in enumerate(calls) if call.block.split("+")[0] in names]
        forwards: dict[tuple[str, int], int] = {}
        extra: dict[int, list[BlockCall]] = {}
        for number, position in enumerate(computing):
            call = calls[position]
            for half, micro_batch in zip(call.block.split("+"), call.arguments, strict=True):
                phase, _, chunk = half.partition(".")
                if phase == "F":
                    forwards[chunk, micro_batch] = number
                elif phase in "BI":
                    self._between(forwards[chunk, micro_batch], number, half, micro_batch, computing, extra)
        found: list[BlockCall] = []
        for position, call in enumerate(calls):
            found += [*extra.get(position, ()), call]
        return tuple(found)

    def _between(
        self,
        forward: int,
        backward: int,
        half: str,
        micro_batch: int,
        computing: list[int],
        extra: dict[int, list[BlockCall]],
    ) -> None:
        """Transfers end after the element that follows the forward, and before the last one before the backward, under
        which the first of them come back."""
        name = f"stow.{half.partition('.')[2]}"
        if name in {block.name for block in self.blocks}:
            number = min(forward + 2, max(backward - 1, forward + 1))
            extra.setdefault(computing[number], []).append(BlockCall(name, (micro_batch,)))


def offload(drafts: Iterable[Draft], chunks: Iterable[Chunk], strategy: Strategy) -> Away:
    """Sends what chosen layers leave for their backward to the host, and fetches it again."""
    table = {draft.name: draft for draft in drafts}
    blocks: list[Block] = []
    for chunk in chunks:
        word = f"c{chunk.number}"
        chosen = {layer for layer in range(chunk.first, chunk.last) if strategy.layer_on_host(layer)}
        names = _left(table[f"F.{word}"], chosen)
        if not names:
            continue
        forward = _Forward(table[f"F.{word}"], names)
        table[f"F.{word}"] = forward.run()
        blocks += [Block(f"stow.{word}", ("i",), tuple(forward.late))] if forward.late else []
        for name in (f"B.{word}", f"I.{word}"):
            if name in table:
                table[name] = _Backward(table[name], names, ahead=strategy.prefetch).run()
    return Away(tuple(table.values()), tuple(blocks))


def _left(draft: Draft, layers: set[int]) -> tuple[str, ...]:
    """Registers of the layers that a forward leaves, in the order in which it makes or meets them."""
    outlive = draft.outlive.union(*(names for _, names in draft.by_tier))
    met = dict.fromkeys(n for i in draft.instructions for n in (*i.reads, *i.writes) if n in outlive)
    return tuple(name for name in met if _layer(name) in layers)


def _layer(register: str) -> int:
    """`f.s0.l5:i` -> 5; -1 of buffers and of what belongs to no layer."""
    _, mark, layer = base_name(register).rpartition(".l")
    value = ":" in register and mark and layer.isdigit() and not register.startswith("tier.")
    return int(layer) if value else -1


@dataclass
class _Rewrite:
    draft: Draft
    names: tuple[str, ...]
    issued: dict[int, list[Instruction]] = field(default_factory=dict)  # before an instruction
    awaited: dict[int, list[Instruction]] = field(default_factory=dict)  # then, before it
    after: dict[int, list[Instruction]] = field(default_factory=dict)

    def merged(self, instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
        found: list[Instruction] = []
        for index, instruction in enumerate(instructions):
            found += [*self.issued.get(index, ()), *self.awaited.get(index, ()), instruction]
            found += self.after.get(index, ())
        return tuple(found)


@dataclass
class _Forward(_Rewrite):
    """`late` ends what the last layer has sent."""

    late: list[Instruction] = field(default_factory=list)

    def run(self) -> Draft:
        layers = stretches(self.draft.instructions)
        last = {n: k for k, i in enumerate(self.draft.instructions) for n in (*i.reads, *i.writes)}
        kept: set[str] = set()
        ended: list[str] = []
        for name in self.names:
            issue = Instruction("offload", (f"{HOST}{name}?",), (name,), stream=TO_HOST)
            wait = Instruction("wait", (f"{HOST}{name}",), (f"{HOST}{name}?",))
            self.after.setdefault(last[name], []).append(issue)
            here = next((n for n, layer in enumerate(layers) if layer[-1] >= last[name]), len(layers) - 1)
            if here + BEHIND < len(layers):
                self.after.setdefault(layers[here + BEHIND][-1], []).append(wait)
            else:
                self.late.append(wait)
                ended.append(name)
                kept.add(name)
        self.late += [Instruction("free", reads=tuple(ended))] if ended else []
        outlive = frozenset(self._left(self.draft.outlive) | kept)
        by_tier = tuple((tier, frozenset(self._left(names) | kept)) for tier, names in self.draft.by_tier)
        return replace(self.draft, instructions=self.merged(self.draft.instructions), outlive=outlive, by_tier=by_tier)

    def _left(self, names: frozenset[str]) -> set[str]:
        return {f"{HOST}{name}" if name in self.names else name for name in names}


@dataclass
class _Backward(_Rewrite):
    """`ahead`: layers by which a fetch comes before its use; `early` are those that belong before the block."""

    ahead: int = 1
    early: list[Early] = field(default_factory=list)

    def run(self) -> Draft:
        instructions = self.draft.instructions
        layers = stretches(instructions)
        first: dict[str, int] = {}
        for index, instruction in enumerate(instructions):
            for name in instruction.reads:
                first.setdefault(name, index)
        for name in sorted((n for n in self.names if n in first), key=first.__getitem__):
            issue = Instruction("prefetch", (f"{BACK}{name}?",), (f"{HOST}{name}",), stream=FROM_HOST)
            waits = self.awaited.setdefault(first[name], [])
            waits.append(Instruction("wait", (f"{BACK}{name}",), (f"{BACK}{name}?",)))
            ahead = next((n for n, layer in enumerate(layers) if layer[-1] >= first[name]), len(layers)) - self.ahead
            if ahead < 0:
                self.early.append(Early(-ahead, issue))
                waits.append(Instruction("free", reads=(f"{HOST}{name}",)))
            else:
                self.issued.setdefault(min(layers[ahead][0], first[name]), []).append(issue)
        renamed = {name: f"{BACK}{name}" for name in self.names}
        read = [replace(i, reads=tuple(renamed.get(n, n) for n in i.reads)) for i in instructions]
        ended = {name for item in self.early for name in item.issue.reads}  # here, which liveness must not do again
        outlive = self.draft.outlive | ended
        return replace(self.draft, instructions=self.merged(read), outlive=outlive, early=tuple(self.early))
