"""One rank alone: a transport that answers for the absent ranks, and a count of the bytes of tensors."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from titan.runtime.transport.base import Channel, Communicator, Finished, Handle, Signature, Transport
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True, slots=True)
class Sent:
    """A collective: bytes of the whole tensor, and bytes that one rank sends in a ring."""

    stream: str
    kind: str
    whole: int
    wire: int


class EchoCommunicator(Communicator):
    """Every other member has what this one has: shapes and allocations are those of a real run, sums are not."""

    __slots__ = ("_sent", "_stream")

    def __init__(self, members: tuple[int, ...], rank: int, stream: str, sent: list[Sent]) -> None:
        super().__init__(members, rank)
        self._stream, self._sent = stream, sent

    def sent(self, kind: str, whole: int, passes: int) -> None:
        self._sent.append(Sent(self._stream, kind, whole, passes * whole * (self.size - 1) // self.size))

    def _gather(self, value: Tensor, signature: Signature, out: Tensor | None = None) -> Handle:
        self.sent("all_gather", value.nbytes * self.size, 1)
        whole = value.new_empty((self.size, *value.shape)) if out is None else out
        for part in whole:
            if part.data_ptr() != value.data_ptr():
                part.copy_(value)
        return Finished(whole)

    def _exchange(self, parts: Tensor, signature: Signature) -> Handle:
        self.sent("all_to_all", parts.nbytes, 1)
        return Finished(parts.clone())

    def _sum_scatter(self, parts: Tensor, signature: Signature) -> Handle:
        self.sent("reduce_scatter", parts.nbytes, 1)
        return Finished(parts[self.position].clone())

    def _reduce(self, value: Tensor, signature: Signature, in_place: bool) -> Handle:
        self.sent("all_reduce", value.nbytes, 2)
        return Finished(value if in_place else value.clone())

    def _broadcast(self, value: Tensor, root: int, signature: Signature) -> Handle:
        self.sent("broadcast", value.nbytes, 1)
        return Finished(value.clone())


class EchoChannel(Channel):
    __slots__ = ()

    def send(self, value: Tensor) -> Handle:
        return Finished(None)

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype) -> Handle:
        return Finished(torch.zeros(shape, dtype=dtype))


class EchoTransport(Transport):
    """`sent` is what the rank communicated, in order of issue."""

    __slots__ = ("sent",)

    def __init__(self, rank: int) -> None:
        super().__init__(rank, torch.device("cpu"))
        self.sent: list[Sent] = []

    def communicator(self, members: tuple[int, ...], stream: str) -> Communicator:
        return EchoCommunicator(members, self.rank, stream, self.sent)

    def channel(self, sender: int, receiver: int, stream: str) -> Channel:
        return EchoChannel()


class Storages(TorchDispatchMode):
    """Bytes of all storages made while the mode is on, alive now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        values = result if isinstance(result, tuple | list) else (result,)
        for value in values:
            if isinstance(value, Tensor):
                self._see(value.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def gone(_: Any) -> None:
            del self._known[key]
            self.live -= size

        self._known[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)
