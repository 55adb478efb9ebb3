"""Point-to-point transfers: turns an order into block calls with posted receives and a window of outstanding sends.

A receive is its own block, called one element ahead of the element that waits for it, so that data arrives under
compute; receives of one channel are posted in the order in which the other side sends. A send is issued in the block
that makes the value; the value stays borrowed until the send's wait, which is a block too: called when the window of
outstanding sends of that channel is full, and at the end for the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, pairwise, repeat
from typing import NamedTuple

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


class _Calls(dict[str, list[BlockCall]]):
    """Calls of blocks with each micro-batch, by block; made together when a block is first asked for."""

    def __init__(self, micro_batches: int) -> None:
        self._arguments = [(i,) for i in range(micro_batches)]

    def __missing__(self, block: str) -> list[BlockCall]:
        fields = zip(repeat(block), self._arguments)
        found = self[block] = list(map(tuple.__new__, repeat(BlockCall), fields))  # half the time of calling the class
        return found


_calls = lru_cache(maxsize=1)(_Calls)  # an evaluation has most of its transfers in common with training


class _Channel:
    """Messages of one kind between two ranks, in the order in which they are sent. `received` are the calls of the
    receiver, so many of which are `posted`; `sent` those with which the sender ends each."""

    __slots__ = ("posted", "received", "sent")

    def __init__(self) -> None:
        self.received: list[BlockCall] = []
        self.sent: list[BlockCall] = []
        self.posted = 0

    def post(self, number: int, calls: list[BlockCall]) -> None:
        """Calls the receive of a message, behind those of all that come before it, unless that is done."""
        calls += self.received[self.posted : number + 1]
        self.posted = max(self.posted, number + 1)


class _End(NamedTuple):
    """What elements of a chunk send through a channel: `numbers` of the messages by micro-batch, and the calls with
    which they are received and their sends end."""

    channel: _Channel
    numbers: dict[int, int]
    received: list[BlockCall]
    sent: list[BlockCall]


_Ends = dict[str, list[_End | None]]  # by phase and chunk of the elements at this end


@lru_cache(maxsize=8)  # plans that differ in the tiers of their layers have one order
def transfers(order: Order, window: int, forward: str = "F") -> tuple[tuple[BlockCall, ...], ...]:
    """Block calls of every rank. `forward` names the forward blocks (E in an evaluation)."""
    made = _calls(1 + max((e.micro_batch for e in order.elements(0)), default=-1))
    incoming, outgoing = _channels(order, made)
    elements = [order.elements(rank) for rank in range(len(order.ranks))]
    used = [_send(program, outgoing) for program in elements]
    writer = _Writer(window, forward, incoming, outgoing, made)
    programs = list(map(writer.paired, order.ranks) if order.paired else map(writer.calls, elements))
    for calls, channels in zip(programs, used, strict=True):
        calls += chain.from_iterable(channel.sent[-window:] for channel in channels)
    return tuple(map(tuple, programs))


def _channels(order: Order, made: _Calls) -> tuple[_Ends, _Ends]:
    """Channels by the elements that wait for their messages, and by those that send them."""
    found: dict[tuple[int, int, str], _Channel] = {}
    incoming, outgoing = (_by_kind(order) for _ in range(2))
    for chunk, (here, there) in enumerate(pairwise(order.placement)):
        if order.last(chunk) or here == there:
            continue
        for kind, phases, sender, receiver in (("x", "F", chunk, chunk + 1), ("d", "BI", chunk + 1, chunk)):
            ranks = order.placement[sender], order.placement[receiver]
            channel = found.setdefault((*ranks, kind), _Channel())
            end = _End(channel, {}, made[f"recv.{kind}.c{receiver}"], made[f"sent.{kind}.c{sender}"])
            for phase in phases:
                outgoing[phase][sender] = incoming[phase][receiver] = end
    return incoming, outgoing


def _by_kind(order: Order) -> _Ends:
    """No ends yet, for every phase and chunk."""
    return {phase: [None] * len(order.placement) for phase in "FBIW"}


def _send(elements: Iterable[Element], outgoing: _Ends) -> list[_Channel]:
    """Tells channels their messages from one rank; those channels, as they come into use."""
    used: list[_Channel] = []
    for phase, chunk, micro_batch in elements:
        end = outgoing[phase][chunk]
        if end is not None:
            channel, numbers, received, sent = end
            if not channel.sent:
                used.append(channel)
            numbers[micro_batch] = len(channel.sent)
            channel.received.append(received[micro_batch])
            channel.sent.append(sent[micro_batch])
    return used


class _Kind(NamedTuple):
    """Elements of a phase and a chunk: their block with its calls by micro-batch, what they wait for, and, where they
    send, what ends before each of them, in order."""

    block: str
    calls: list[BlockCall]
    incoming: _End | None
    ended: Iterator[BlockCall | None] | None


class _Writer:
    """Writes the calls of ranks. `forward` names the forward blocks; `made` are all calls."""

    def __init__(self, window: int, forward: str, incoming: _Ends, outgoing: _Ends, made: _Calls) -> None:
        self.window, self.forward, self.incoming, self.outgoing, self.made = window, forward, incoming, outgoing, made
        self._kinds: dict[str, list[_Kind | None]] = {phase: [None] * len(ends) for phase, ends in incoming.items()}
        self._ended: dict[_Channel, Iterator[BlockCall | None]] = {}

    def _kind(self, phase: str, chunk: int) -> _Kind:
        end = self.outgoing[phase][chunk]
        ended = None
        if end is not None:
            behind = chain(repeat(None, self.window), end.channel.sent)
            ended = self._ended.setdefault(end.channel, behind)  # of several chunks, where they share the channel
        block = f"{self.forward if phase == 'F' else phase}.c{chunk}"
        found = _Kind(block, self.made[block], self.incoming[phase][chunk], ended)
        self._kinds[phase][chunk] = found
        return found

    def calls(self, elements: Iterable[Element]) -> list[BlockCall]:
        """Calls of one rank: of its elements, of receives one element ahead, and of the ends of sends behind the
        window."""
        kinds = self._kinds
        found: list[BlockCall] = []
        before: BlockCall | None = None  # of the element before, with what ends before it: behind the receives for this
        end: BlockCall | None = None
        for phase, chunk, micro_batch in elements:
            _, calls, incoming, ended = kinds[phase][chunk] or self._kind(phase, chunk)
            if incoming is not None:
                channel, number = incoming.channel, incoming.numbers[micro_batch]
                if number == channel.posted:
                    found.append(channel.received[number])
                    channel.posted = number + 1
                else:
                    channel.post(number, found)
            if end is not None:
                found.append(end)
            if before is not None:
                found.append(before)
            before, end = calls[micro_batch], None if ended is None else next(ended)
        return [*found, *filter(None, (end, before))]

    def paired(self, items: Sequence[Element | Pair]) -> list[BlockCall]:
        """The same where some items are pairs: what ends before both halves send comes before their call."""
        found: list[BlockCall] = []
        before: list[BlockCall] = []
        for item in items:
            halves = [
                (self._kinds[e.phase][e.chunk] or self._kind(e.phase, e.chunk), e.micro_batch) for e in parts(item)
            ]
            for kind, micro_batch in halves:
                if kind.incoming is not None:
                    kind.incoming.channel.post(kind.incoming.numbers[micro_batch], found)
            found += before
            ends = (next(kind.ended) for kind, _ in halves if kind.ended is not None)
            name = "+".join(kind.block for kind, _ in halves)
            before = [*filter(None, ends), BlockCall(name, tuple(micro_batch for _, micro_batch in halves))]
        return found + before
