"""All ranks in one process. Collectives and messages meet by order of issue and are checked against each other.

Everything is a rendezvous: a send is done when its receive is posted, a collective when its last member arrives, so a
program that runs here needs no buffering anywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from titan.grammar.diagnostics import Diagnostic, TitanError
from titan.runtime.transport.base import (
    Channel,
    Communicator,
    Handle,
    Signature,
    Transport,
    maximum_in_order,
    signature,
    sum_in_order,
)
from torch import Tensor

Combine = Callable[[list[Tensor]], list[Tensor]]


class Loopback:
    """The meeting place of all ranks of one process."""

    def __init__(self, device: str = "cpu") -> None:
        self._device = torch.device(device)
        self._meetings: dict[tuple[tuple[int, ...], str], _Meeting] = {}
        self._pipes: dict[tuple[int, int, str], _Pipe] = {}

    def transport(self, rank: int) -> LoopbackTransport:
        return LoopbackTransport(self, rank, self._device)

    def meeting(self, members: tuple[int, ...], stream: str) -> _Meeting:
        return self._meetings.setdefault((members, stream), _Meeting(members, stream))

    def pipe(self, sender: int, receiver: int, stream: str) -> _Pipe:
        return self._pipes.setdefault((sender, receiver, stream), _Pipe(sender, receiver, stream))

    def unmatched(self) -> list[str]:
        """Operations that some members issued and others never did, one line each; empty after a whole step."""
        return [
            *(line for meeting in self._meetings.values() for line in meeting.unmatched()),
            *(line for pipe in self._pipes.values() for line in pipe.unmatched()),
        ]


class LoopbackTransport(Transport):
    __slots__ = ("_world",)

    def __init__(self, world: Loopback, rank: int, device: torch.device) -> None:
        super().__init__(rank, device)
        self._world = world

    def communicator(self, members: tuple[int, ...], stream: str) -> Communicator:
        return LoopbackCommunicator(members, self.rank, self._world.meeting(members, stream))

    def channel(self, sender: int, receiver: int, stream: str) -> Channel:
        return LoopbackChannel(self._world.pipe(sender, receiver, stream))


class _Round:
    """One collective: filled by its members, computed for all of them when the last arrives."""

    __slots__ = ("first", "members", "number", "results", "signature", "stream", "values")

    def __init__(self, members: tuple[int, ...], stream: str, number: int, opened: Signature, first: int) -> None:
        self.members, self.stream, self.number = members, stream, number
        self.signature, self.first = opened, first
        self.values: list[Tensor | None] = [None] * len(members)
        self.results: list[Tensor] | None = None

    def join(self, position: int, joined: Signature, value: Tensor, combine: Combine) -> None:
        if joined != self.signature:
            raise TitanError(self._mismatch(position, joined), exit_code=1)
        self.values[position] = value
        arrived = [v for v in self.values if v is not None]
        if len(arrived) == len(self.members):
            self.results = combine(arrived)
            self.values.clear()

    def _mismatch(self, position: int, joined: Signature) -> Diagnostic:
        return Diagnostic(
            "T611",
            f"operation {self.number} of stream {self.stream} among ranks {list(self.members)} is "
            f"`{self.signature}` on rank {self.members[self.first]} but `{joined}` on rank {self.members[position]}",
        )

    def done(self) -> bool:
        return self.results is not None

    def waiting_for(self) -> tuple[int, ...]:
        return tuple(m for m, v in zip(self.members, self.values) if v is None) if self.results is None else ()


class _Share(Handle):
    """One member's view of a round."""

    __slots__ = ("_position", "_round")

    def __init__(self, joined: _Round, position: int) -> None:
        self._round, self._position = joined, position

    def done(self) -> bool:
        return self._round.results is not None

    def result(self) -> Tensor:
        assert self._round.results is not None
        return self._round.results[self._position]

    def waiting_for(self) -> tuple[int, ...]:
        return self._round.waiting_for()


class _Meeting:
    """The rounds of one group instance on one stream; each member is at its own count."""

    def __init__(self, members: tuple[int, ...], stream: str) -> None:
        self.members, self.stream = members, stream
        self._counts = [0] * len(members)
        self._open: dict[int, _Round] = {}

    def join(self, position: int, joined: Signature, value: Tensor, combine: Combine) -> Handle:
        number = self._counts[position]
        self._counts[position] += 1
        found = self._open.get(number)
        if found is None:
            found = self._open[number] = _Round(self.members, self.stream, number, joined, position)
        found.join(position, joined, value, combine)
        if found.done():
            del self._open[number]
        return _Share(found, position)

    def unmatched(self) -> list[str]:
        return [
            f"`{r.signature}` on stream {self.stream}: ranks {list(r.waiting_for())} of {list(self.members)} never came"
            for r in self._open.values()
        ]


class LoopbackCommunicator(Communicator):
    __slots__ = ("_meeting",)

    def __init__(self, members: tuple[int, ...], rank: int, meeting: _Meeting) -> None:
        super().__init__(members, rank)
        self._meeting = meeting

    def _gather(self, value: Tensor, signature: Signature, out: Tensor | None = None) -> Handle:
        target = value if out is None else out

        def combine(values: list[Tensor]) -> list[Tensor]:
            if out is None:
                return [torch.stack(values) for _ in values]
            whole = torch.stack([v[p] for p, v in enumerate(values)])
            return [v.copy_(whole) for v in values]

        return self._meeting.join(self.position, signature, target, combine)

    def _exchange(self, parts: Tensor, signature: Signature) -> Handle:
        def combine(values: list[Tensor]) -> list[Tensor]:
            return [torch.stack([v[p] for v in values]) for p in range(len(values))]

        return self._meeting.join(self.position, signature, parts, combine)

    def _sum_scatter(self, parts: Tensor, signature: Signature) -> Handle:
        def combine(values: list[Tensor]) -> list[Tensor]:
            return [sum_in_order([v[p] for v in values]) for p in range(len(values))]

        return self._meeting.join(self.position, signature, parts, combine)

    def _reduce(self, value: Tensor, signature: Signature, in_place: bool) -> Handle:
        def combine(values: list[Tensor]) -> list[Tensor]:
            total = maximum_in_order(values) if signature.detail == "op=max" else sum_in_order(values)
            return [v.copy_(total) if in_place else total.clone() for v in values]

        return self._meeting.join(self.position, signature, value, combine)

    def _broadcast(self, value: Tensor, root: int, signature: Signature) -> Handle:
        def combine(values: list[Tensor]) -> list[Tensor]:
            return [values[root].clone() for _ in values]

        sent = value.clone() if root == self.position else value
        return self._meeting.join(self.position, signature, sent, combine)


class _Message(Handle):
    """A send with its receive; whichever comes first opens it. As a handle it is the receiver's."""

    __slots__ = ("absent", "signature", "value")

    def __init__(self, opened: Signature, absent: int, value: Tensor | None) -> None:
        self.signature, self.absent, self.value = opened, absent, value

    def done(self) -> bool:
        return self.absent < 0

    def result(self) -> Tensor | None:
        return self.value

    def waiting_for(self) -> tuple[int, ...]:
        return () if self.absent < 0 else (self.absent,)


class _Sent(Handle):
    """The sender's view of a message."""

    __slots__ = ("_message",)

    def __init__(self, message: _Message) -> None:
        self._message = message

    def done(self) -> bool:
        return self._message.absent < 0

    def result(self) -> None:
        return None

    def waiting_for(self) -> tuple[int, ...]:
        return self._message.waiting_for()


class _Pipe:
    """Messages from one rank to another, in order; at any time either sends or receives are waiting, never both."""

    def __init__(self, sender: int, receiver: int, stream: str) -> None:
        self.sender, self.receiver, self.stream = sender, receiver, stream
        self._count = 0
        self._sends: deque[_Message] = deque()
        self._receives: deque[_Message] = deque()

    def send(self, value: Tensor) -> Handle:
        given = signature("message", value, "")
        if self._receives:
            message = self._receives.popleft()
            self._match(message, given, message.signature)
            message.value = value.clone()
        else:
            message = _Message(given, self.receiver, value)
            self._sends.append(message)
        return _Sent(message)

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype) -> Handle:
        wanted = Signature("message", tuple(shape), dtype)
        if not self._sends:
            message = _Message(wanted, self.sender, None)
            self._receives.append(message)
            return message
        message = self._sends.popleft()
        self._match(message, message.signature, wanted)
        assert message.value is not None
        message.value = message.value.clone()
        return message

    def _match(self, message: _Message, given: Signature, wanted: Signature) -> None:
        if given != wanted:
            text = (
                f"message {self._count} of stream {self.stream}: rank {self.sender} sends `{given}`, "
                f"rank {self.receiver} expects `{wanted}`"
            )
            raise TitanError(Diagnostic("T611", text), exit_code=1)
        self._count += 1
        message.absent = -1

    def unmatched(self) -> list[str]:
        ends = [(m, "send", "receive") for m in self._sends] + [(m, "receive", "send") for m in self._receives]
        return [
            f"{mine} of `{m.signature}` on stream {self.stream} from rank {self.sender} to rank {self.receiver}: "
            f"no {theirs} was posted"
            for m, mine, theirs in ends
        ]


class LoopbackChannel(Channel):
    __slots__ = ("_pipe",)

    def __init__(self, pipe: _Pipe) -> None:
        self._pipe = pipe

    def send(self, value: Tensor) -> Handle:
        return self._pipe.send(value)

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype) -> Handle:
        return self._pipe.recv(shape, dtype)
