"""Overlap: what a block needs first is issued under the block before it.

Inside a block a gather, or a copy from the host, is issued some layers before the layer that reads it. For the first
layers of a block those layers lie in the element of the order before it, whatever that computes: so its call gets a
variant of its block that issues them there, for the micro-batches of the element that follows (`k`, and `l` of a pair).
What cannot be issued there stands in a block of its own right before: at the beginning of an order, and copies of what
the element before has only just sent to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import field, replace

from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.program import Block, BlockCall

OWN, NEXT = ("i", "j"), ("k", "l")  # micro-batches of an element, and of the one that follows it
ALONE = {"unshard": "gather", "prefetch": "fetch"}  # words of the blocks between


@dataclass(frozen=True, slots=True)
class Early:
    """An issue that belongs so many layers before the first one of a block."""

    layers: int
    issue: Instruction

    def of(self, symbol: str) -> Early:
        """The same for the micro-batch `symbol` of another block."""

        def new(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(name.replace(":i", f":{symbol}") for name in names)

        return replace(self, issue=replace(self.issue, writes=new(self.issue.writes), reads=new(self.issue.reads)))


@dataclass(frozen=True)
class Under:
    """What a call issues for the next element, whose halves are called `name`; `arguments`: its micro-batches."""

    early: tuple[Early, ...]
    name: str
    arguments: tuple[int, ...]


@dataclass
class Overlap:
    """Places of early issues in an order. `under`: by position of the call that makes them; `alone`: by position of the
    call right before which they have a call of their own, whose blocks are `blocks`."""

    under: dict[int, Under] = field(default_factory=dict)
    alone: dict[int, list[BlockCall]] = field(default_factory=dict)
    blocks: dict[str, Block] = field(default_factory=dict)

    def called(self, calls: Sequence[BlockCall]) -> tuple[BlockCall, ...]:
        """The calls with those of the blocks between."""
        if not self.alone:
            return tuple(calls)
        found: list[BlockCall] = []
        for position, call in enumerate(calls):
            found += [*self.alone.get(position, ()), call]
        return tuple(found)


def overlap(
    calls: Sequence[BlockCall],
    computing: Collection[str],
    early: Callable[[int, int, str], Iterable[Early]],
    special: Collection[int],
) -> Overlap:
    """`computing` are the names of elements and halves of pairs; `early` gives what one needs first, by position of the
    call, number of the half and name; all calls of a block but the `special` ones need the same."""
    found = Overlap()
    before: int | None = None
    needless: set[str] = set()  # blocks whose calls need nothing
    for position, call in enumerate(calls):
        if call.block in needless and position not in special:
            before = position
            continue
        halves = call.block.split("+")
        if halves[0] not in computing:
            continue
        needed = [tuple(early(position, number, half)) for number, half in enumerate(halves)]
        if not any(needed) and position not in special:
            needless.add(call.block)
        issued: list[Early] = []
        symbols: dict[str, int] = {}
        for number, (half, micro_batch) in enumerate(zip(halves, call.arguments, strict=True)):
            alone: list[Early] = []
            for item in needed[number]:
                if before is None or not _there(item, calls[before], half, micro_batch):
                    alone.append(item)
                    continue
                issued.append(item.of(NEXT[number]))
                if any(":" in name for name in item.issue.writes):
                    symbols[NEXT[number]] = micro_batch
            if alone:
                _call_alone(found, alone, half, BlockCall("", (micro_batch,)), position)
        if issued and before is not None:
            found.under[before] = Under(tuple(issued), call.block.replace("+", "_"), tuple(symbols.values()))
        before = position
    return found


def _there(item: Early, before: BlockCall, half: str, micro_batch: int) -> bool:
    """Whether what is read is there while the element before runs: it is not what that sends to the host."""
    if item.issue.opcode != "prefetch":
        return True
    forward = f"F.{half.partition('.')[2]}"
    return (forward, micro_batch) not in zip(before.block.split("+"), before.arguments, strict=True)


def _call_alone(found: Overlap, items: list[Early], half: str, call: BlockCall, position: int) -> None:
    for opcode, word in ALONE.items():
        issues = tuple(item.issue for item in items if item.issue.opcode == opcode)
        if issues:
            name = f"{word}.{half}"
            of_batch = any(":" in name for issue in issues for name in issue.writes)
            found.blocks[name] = Block(name, OWN[:1] if of_batch else (), issues)
            found.alone.setdefault(position, []).append(BlockCall(name, call.arguments if of_batch else ()))
