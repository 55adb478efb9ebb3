"""Point-to-point transfers: turns an order into block calls with posted receives and a window of outstanding sends.

A receive is its own block, called one element ahead of the element that waits for it, so that data arrives under
compute; receives of one channel are posted in the order in which the other side sends. A send is issued in the block
that makes the value; the value stays borrowed until the send's wait, which is a block too: called when the window of
outstanding sends of that channel is full, and at the end for the rest.
"""

from __future__ import annotations

from functools import lru_cache, partial
from itertools import pairwise, zip_longest

from titan.compiler.passes.blocks import Chunk
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.program import Block, BlockCall
from titan.compiler.schedules.order import Element, Order, Pair
from titan.compiler.schedules.wiring import parts


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


_CALL = partial(tuple.__new__, BlockCall)  # of a pair: half the time of a call by fields, and there are many


class _Channel:
    """Messages of one kind between two ranks, each by the chunk that receives it and its micro-batch, in the order in
    which they are sent; as calls of the receiver and of the sender. Of these `posted`, `begun` and `ended` are made."""

    __slots__ = ("begun", "ended", "kind", "messages", "onward", "places", "posted", "received", "sent")

    def __init__(self, kind: str) -> None:
        self.kind, self.onward = kind, 1 if kind == "x" else -1
        self.messages: list[tuple[int, int]] = []
        self.places: dict[tuple[int, int], int] = {}
        self.received: list[BlockCall] = []
        self.sent: list[BlockCall] = []
        self.posted = self.begun = self.ended = 0

    def number(self) -> None:
        """Makes the calls when all messages are known."""
        chunks = {receiver for receiver, _ in self.messages}
        received = {c: f"recv.{self.kind}.c{c}" for c in chunks}
        sent = {c: f"sent.{self.kind}.c{c - self.onward}" for c in chunks}
        self.places = {message: place for place, message in enumerate(self.messages)}
        self.received = [_CALL((received[c], (micro_batch,))) for c, micro_batch in self.messages]
        self.sent = [_CALL((sent[c], (micro_batch,))) for c, micro_batch in self.messages]


_Ends = dict[tuple[str, int], _Channel]  # by phase and chunk of the elements at this end
_Awaited = tuple[tuple[_Channel, tuple[int, int]], ...]
_Step = tuple[_Awaited, tuple[_Channel, ...], BlockCall]  # messages awaited, sends, call


@lru_cache(maxsize=8)  # plans that differ in the tiers of their layers have one order
def transfers(order: Order, window: int, forward: str = "F") -> tuple[tuple[BlockCall, ...], ...]:
    """Block calls of every rank. `forward` names the forward blocks (E in an evaluation)."""
    incoming, outgoing = _channels(order)
    words = {"F": forward, "B": "B", "I": "I", "W": "W"}
    names = {(p, c): f"{word}.c{c}" for p, word in words.items() for c in range(len(order.placement))}
    programs = [[_step(item, incoming, outgoing, names) for item in items] for items in order.ranks]
    for channel in dict.fromkeys(outgoing.values()):
        channel.number()
    return tuple(_calls(steps, window) for steps in programs)


def _channels(order: Order) -> tuple[_Ends, _Ends]:
    """Channels by the elements that wait for their messages, and by those that send them."""
    found: dict[tuple[int, int, str], _Channel] = {}
    incoming: _Ends = {}
    outgoing: _Ends = {}
    for chunk, (here, there) in enumerate(pairwise(order.placement)):
        if not order.last(chunk) and here != there:
            forwards = found.setdefault((here, there, "x"), _Channel("x"))
            outgoing["F", chunk] = incoming["F", chunk + 1] = forwards
            backwards = found.setdefault((there, here, "d"), _Channel("d"))
            for phase in "BI":
                outgoing[phase, chunk + 1] = incoming[phase, chunk] = backwards
    return incoming, outgoing


def _step(item: Element | Pair, incoming: _Ends, outgoing: _Ends, names: dict[tuple[str, int], str]) -> _Step:
    """An item of a rank's order; what it sends is put into its channels."""
    if isinstance(item, Pair):
        one, other = (_step(element, incoming, outgoing, names) for element in parts(item))
        f, b = item.forward, item.backward
        call = BlockCall(f"F.c{f.chunk}+{b.phase}.c{b.chunk}", (f.micro_batch, b.micro_batch))
        return one[0] + other[0], one[1] + other[1], call
    phase, chunk, micro_batch = item
    end = (phase, chunk)
    channel, sends = incoming.get(end), outgoing.get(end)
    if sends is not None:
        sends.messages.append((chunk + sends.onward, micro_batch))
    return (
        () if channel is None else ((channel, (chunk, micro_batch)),),
        () if sends is None else (sends,),
        _CALL((names[end], (micro_batch,))),
    )


def _calls(steps: list[_Step], window: int) -> tuple[BlockCall, ...]:
    """Calls of one rank: of its steps, of receives one step ahead, and of the ends of sends."""
    found: list[BlockCall] = []
    used: dict[_Channel, None] = {}  # those that are sent on, in order
    for following, step in zip_longest(steps, (None, *steps)):
        for channel, message in following[0] if following else ():
            last = channel.places[message] + 1
            if last > channel.posted:
                found += channel.received[channel.posted : last]
                channel.posted = last
        if step is None:
            continue
        for channel in step[1]:
            used[channel] = None
            while channel.begun - channel.ended >= window:
                found.append(channel.sent[channel.ended])
                channel.ended += 1
            channel.begun += 1
        found.append(step[2])
    for channel in used:
        found += channel.sent[channel.ended : channel.begun]
    return tuple(found)
