"""Point-to-point transfers: turns an order into block calls with posted receives and a window of outstanding sends.

A receive is its own block, called one element ahead of the element that waits for it, so that data arrives under
compute; receives of one channel are posted in the order in which the other side sends. A send is issued in the block
that makes the value; the value stays borrowed until the send's wait, which is a block too: called when the window of
outstanding sends of that channel is full, and at the end for the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain, pairwise, repeat

from titan.compiler.passes.blocks import Chunk
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.program import Block, BlockCall
from titan.compiler.schedules.order import Element, Order, Pair


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
    """Messages of one kind between two ranks, by the elements that send them, in order. `received` are the calls of the
    receiver, so many of which are `posted`; `ended` what the sender calls before each send, and then what is left at
    the end."""

    __slots__ = ("ended", "kind", "messages", "onward", "posted", "received")

    def __init__(self, kind: str) -> None:
        self.kind, self.onward = kind, 1 if kind == "x" else -1
        self.messages: list[Element] = []
        self.received: list[BlockCall] = []
        self.ended: _Ended = iter(())
        self.posted = 0

    def write(self, window: int, alone: Sequence[tuple[int]]) -> None:
        """Makes the calls when all messages are known."""
        chunks = [chunk for _, chunk, _ in self.messages]
        arguments = [alone[micro_batch] for _, _, micro_batch in self.messages]
        sent = {c: f"sent.{self.kind}.c{c}" for c in set(chunks)}
        received = {c: f"recv.{self.kind}.c{c + self.onward}" for c in sent}
        self.received = list(map(_CALL, zip(map(received.__getitem__, chunks), arguments, strict=True)))
        ends = map(_CALL, zip(map(sent.__getitem__, chunks), arguments, strict=True))
        self.ended = chain(repeat((), window), zip(ends, strict=True))

    def post(self, number: int, calls: list[BlockCall]) -> None:
        """Calls the receive of a message, behind those of all that come before it, unless that is done."""
        while self.posted <= number:
            calls.append(self.received[self.posted])
            self.posted += 1


_Called = Sequence[BlockCall]
_Ended = Iterator[_Called]
_End = tuple[_Channel, dict[int, int]]  # a channel, and numbers of its messages to one chunk by micro-batch
_Ends = dict[tuple[str, int], _End]  # by phase and chunk of the elements at this end


@lru_cache(maxsize=8)  # plans that differ in the tiers of their layers have one order
def transfers(order: Order, window: int, forward: str = "F") -> tuple[tuple[BlockCall, ...], ...]:
    """Block calls of every rank. `forward` names the forward blocks (E in an evaluation)."""
    incoming, outgoing = _channels(order)
    used = [_send(order.elements(rank), outgoing) for rank in range(len(order.ranks))]
    alone = [(i,) for i in range(1 + max((e.micro_batch for e in order.elements(0)), default=-1))]
    for channel in chain.from_iterable(used):
        channel.write(window, alone)
    writer = _Writer(order, forward, incoming, outgoing, alone)
    programs = [writer.calls(items) for items in order.ranks]
    for calls, channels in zip(programs, used, strict=True):
        calls += chain.from_iterable(chain.from_iterable(channel.ended for channel in channels))
    return tuple(map(tuple, programs))


def _channels(order: Order) -> tuple[_Ends, _Ends]:
    """Channels by the elements that wait for their messages, and by those that send them."""
    found: dict[tuple[int, int, str], _Channel] = {}
    incoming: _Ends = {}
    outgoing: _Ends = {}
    for chunk, (here, there) in enumerate(pairwise(order.placement)):
        if not order.last(chunk) and here != there:
            forwards: _End = (found.setdefault((here, there, "x"), _Channel("x")), {})
            outgoing["F", chunk] = incoming["F", chunk + 1] = forwards
            backwards: _End = (found.setdefault((there, here, "d"), _Channel("d")), {})
            for phase in "BI":
                outgoing[phase, chunk + 1] = incoming[phase, chunk] = backwards
    return incoming, outgoing


def _send(elements: Iterable[Element], outgoing: _Ends) -> list[_Channel]:
    """Tells channels their messages from one rank; those channels, as they come into use."""
    used: list[_Channel] = []
    for element in elements:
        phase, chunk, micro_batch = element
        end = outgoing.get((phase, chunk))
        if end is not None:
            channel, numbers = end
            if not channel.messages:
                used.append(channel)
            numbers[micro_batch] = len(channel.messages)
            channel.messages.append(element)
    return used


class _Writer:
    """Writes the calls of ranks. `elements`, by phase and chunk: their block, what they wait for, what ends before they
    send; `alone` are the arguments of their calls."""

    def __init__(
        self, order: Order, forward: str, incoming: _Ends, outgoing: _Ends, alone: Sequence[tuple[int]]
    ) -> None:
        self.alone = alone
        self.elements: dict[tuple[str, int], tuple[str, _End | None, _Ended]] = {}
        nothing: _Ended = repeat(())
        for phase, word in {"F": forward, "B": "B", "I": "I", "W": "W"}.items():
            for chunk in range(len(order.placement)):
                end = (phase, chunk)
                ended = outgoing[end][0].ended if end in outgoing else nothing
                self.elements[end] = (f"{word}.c{chunk}", incoming.get(end), ended)

    def calls(self, items: Sequence[Element | Pair]) -> list[BlockCall]:
        """Calls of one rank: of its items, of receives one item ahead, and of the ends of sends behind the window."""
        elements, alone = self.elements, self.alone
        found: list[BlockCall] = []
        before: tuple[_Called, BlockCall] | None = None  # of the item before: behind the receives for this one
        for item in items:
            if isinstance(item, Pair):
                ends, call = self._pair(item, found)
            else:
                phase, chunk, micro_batch = item
                block, incoming, ended = elements[phase, chunk]
                if incoming is not None:
                    channel, numbers = incoming
                    channel.post(numbers[micro_batch], found)
                ends, call = next(ended), _CALL((block, alone[micro_batch]))
            if before is not None:
                found += before[0]
                found.append(before[1])
            before = ends, call
        return found if before is None else [*found, *before[0], before[1]]

    def _pair(self, item: Pair, found: list[BlockCall]) -> tuple[_Called, BlockCall]:
        """What ends before both halves send, and their call; what they wait for is received."""
        ends: list[BlockCall] = []
        for phase, chunk, micro_batch in item:
            _, incoming, ended = self.elements[phase, chunk]
            if incoming is not None:
                channel, numbers = incoming
                channel.post(numbers[micro_batch], found)
            ends += next(ended)
        blocks = [self.elements[half[:2]][0] for half in item]
        return ends, BlockCall("+".join(blocks), tuple(half.micro_batch for half in item))
