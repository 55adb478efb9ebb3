"""Point-to-point transfers: turns an order into block calls with posted receives and a window of outstanding sends.

A receive is its own block, called one element ahead of the element that waits for it, so that data can arrive under
compute. A send is issued in the block that makes the value; the value stays borrowed until the send's wait, which is a
block too: called when the window of outstanding sends of that channel is full, and at the end for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from titan.compiler.passes.blocks import Chunk
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.program import Block, BlockCall
from titan.compiler.schedules.order import Element

WINDOW = 2  # outstanding sends per channel: the smallest with which 1F1B completes; slots are priced as live registers


def transfer_blocks(chunk: Chunk, training: bool) -> tuple[Block, ...]:
    """The receive and sent blocks of a chunk."""
    found = []
    if chunk.before:
        found.append(_receive(f"recv.x.c{chunk.number}", chunk.entry, chunk.before, "act"))
    if chunk.after:
        found.append(_sent(f"sent.x.c{chunk.number}", chunk.exit))
    if training and chunk.after:
        found.append(_receive(f"recv.d.c{chunk.number}", f"d.{chunk.exit}", chunk.after, "grad"))
    if training and chunk.before:
        found.append(_sent(f"sent.d.c{chunk.number}", f"d.{chunk.entry}"))
    return tuple(found)


def _receive(name: str, register: str, offset: int, stream: str) -> Block:
    instruction = Instruction("recv", (f"{register}?",), (), (), "", "pipeline", stream, (("peer", offset),))
    return Block(name, ("i",), (instruction,))


def _sent(name: str, register: str) -> Block:
    return Block(name, ("i",), (Instruction("wait", (), (f"t.{register}?",)), Instruction("free", reads=(register,))))


@dataclass
class _Calls:
    chunks: dict[int, Chunk]
    calls: list[BlockCall] = field(default_factory=list)
    outstanding: dict[str, list[int]] = field(default_factory=dict)

    def receive(self, element: Element) -> None:
        chunk = self.chunks[element.chunk]
        if element.phase in "FE" and chunk.before:
            self.calls.append(BlockCall(f"recv.x.c{chunk.number}", (element.micro_batch,)))
        elif element.phase in "BI" and chunk.after:
            self.calls.append(BlockCall(f"recv.d.c{chunk.number}", (element.micro_batch,)))

    def run(self, element: Element) -> None:
        chunk = self.chunks[element.chunk]
        sends = ""
        if element.phase in "FE" and chunk.after:
            sends = f"sent.x.c{chunk.number}"
        elif element.phase in "BI" and chunk.before:
            sends = f"sent.d.c{chunk.number}"
        if sends:
            waiting = self.outstanding.setdefault(sends, [])
            while len(waiting) >= WINDOW:
                self.calls.append(BlockCall(sends, (waiting.pop(0),)))
            waiting.append(element.micro_batch)
        self.calls.append(BlockCall(f"{element.phase}.c{chunk.number}", (element.micro_batch,)))

    def drain(self) -> None:
        for name, waiting in self.outstanding.items():
            self.calls += [BlockCall(name, (i,)) for i in waiting]
            waiting.clear()


def transfers(elements: Sequence[Element], chunks: dict[int, Chunk]) -> tuple[BlockCall, ...]:
    """Block calls of one rank's order."""
    calls = _Calls(chunks)
    for position, element in enumerate(elements):
        if position == 0:
            calls.receive(element)
        if position + 1 < len(elements):
            calls.receive(elements[position + 1])
        calls.run(element)
    calls.drain()
    return tuple(calls.calls)
