"""Point-to-point transfers: turns an order into block calls with posted receives and a window of outstanding sends.

A receive is its own block, called one element ahead of the element that waits for it, so that data arrives under
compute; receives of one channel are posted in the order in which the other side sends. A send is issued in the block
that makes the value; the value stays borrowed until the send's wait, which is a block too: called when the window of
outstanding sends of that channel is full, and at the end for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from titan.compiler.passes.blocks import Chunk
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.program import Block, BlockCall
from titan.compiler.schedules.order import Element, Order, Pair
from titan.compiler.schedules.wiring import parts

Message = tuple[str, int, int]  # ("x" or "d", chunk that receives or sends it, micro-batch)
Channel = tuple[int, int, str]  # sender, receiver, "x" or "d"


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


@lru_cache(maxsize=8)  # plans that differ in the tiers of their layers have one order
def transfers(order: Order, window: int, forward: str = "F") -> tuple[tuple[BlockCall, ...], ...]:
    """Block calls of every rank. `forward` names the forward blocks (E in an evaluation)."""
    sends = _channels(order)
    return tuple(_Rank(rank, order, sends, window, forward).calls() for rank in range(len(order.ranks)))


def _incoming(element: Element, order: Order) -> tuple[Channel, Message] | None:
    """The message that an element waits for, if it comes from another rank."""
    c, here = element.chunk, order.placement[element.chunk]
    if element.phase == "F" and not order.first(c) and order.placement[c - 1] != here:
        return (order.placement[c - 1], here, "x"), ("x", c, element.micro_batch)
    if element.phase in "BI" and not order.last(c) and order.placement[c + 1] != here:
        return (order.placement[c + 1], here, "d"), ("d", c, element.micro_batch)
    return None


def _outgoing(element: Element, order: Order) -> tuple[Channel, Message] | None:
    """The message that an element sends: named as its receiver names it."""
    c, here = element.chunk, order.placement[element.chunk]
    if element.phase == "F" and not order.last(c) and order.placement[c + 1] != here:
        return (here, order.placement[c + 1], "x"), ("x", c + 1, element.micro_batch)
    if element.phase in "BI" and not order.first(c) and order.placement[c - 1] != here:
        return (here, order.placement[c - 1], "d"), ("d", c - 1, element.micro_batch)
    return None


def _channels(order: Order) -> dict[Channel, list[Message]]:
    """Messages of every channel in the order in which they are sent."""
    found: dict[Channel, list[Message]] = {}
    for rank in range(len(order.ranks)):
        for element in order.elements(rank):
            sent = _outgoing(element, order)
            if sent:
                found.setdefault(sent[0], []).append(sent[1])
    return found


@dataclass
class _Rank:
    rank: int
    order: Order
    sends: Mapping[Channel, list[Message]]
    window: int
    forward: str
    found: list[BlockCall] = field(default_factory=list)
    posted: dict[Channel, int] = field(default_factory=dict)
    outstanding: dict[Channel, list[Message]] = field(default_factory=dict)

    def calls(self) -> tuple[BlockCall, ...]:
        items = self.order.ranks[self.rank]
        for position, item in enumerate(items):
            if position == 0:
                self._post(item)
            if position + 1 < len(items):
                self._post(items[position + 1])
            self._run(item)
        for channel, messages in self.outstanding.items():
            self.found += [self._sent(channel, m) for m in messages]
        return tuple(self.found)

    def _post(self, item: Element | Pair) -> None:
        for element in parts(item):
            expected = _incoming(element, self.order)
            if expected is None:
                continue
            channel, message = expected
            sent, first = self.sends[channel], self.posted.get(channel, 0)
            last = sent.index(message, 0) + 1
            for kind, chunk, micro_batch in sent[first:last]:
                self.found.append(BlockCall(f"recv.{kind}.c{chunk}", (micro_batch,)))
            self.posted[channel] = max(first, last)

    def _run(self, item: Element | Pair) -> None:
        for element in parts(item):
            sent = _outgoing(element, self.order)
            if sent is None:
                continue
            waiting = self.outstanding.setdefault(sent[0], [])
            while len(waiting) >= self.window:
                self.found.append(self._sent(sent[0], waiting.pop(0)))
            waiting.append(sent[1])
        self.found.append(self._call(item))

    def _call(self, item: Element | Pair) -> BlockCall:
        if isinstance(item, Pair):
            f, b = item.forward, item.backward
            return BlockCall(f"F.c{f.chunk}+{b.phase}.c{b.chunk}", (f.micro_batch, b.micro_batch))
        phase = self.forward if item.phase == "F" else item.phase
        return BlockCall(f"{phase}.c{item.chunk}", (item.micro_batch,))

    def _sent(self, channel: Channel, message: Message) -> BlockCall:
        kind, chunk, micro_batch = message
        sender = chunk - 1 if kind == "x" else chunk + 1
        return BlockCall(f"sent.{kind}.c{sender}", (micro_batch,))
