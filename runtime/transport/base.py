"""What every transport offers: communicators for collectives, channels for point-to-point, handles to wait on.

A collective is issued and gives a `Handle`; the tensors it reads stay borrowed until the handle's result is taken. The
permutations that dims other than the first need, and the order of sums, stand here once, so that all transports agree:
narrow floating-point sums are accumulated in float32, in the order of the group's members, and rounded once.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class Handle(ABC):
    """An operation under way. `result` may be taken once, and only when `done`."""

    __slots__ = ()

    @abstractmethod
    def done(self) -> bool: ...

    @abstractmethod
    def result(self) -> Tensor | None: ...

    def settle(self, seconds: float) -> None:
        """Lets this thread sleep until the operation is done, for about `seconds` at most."""
        time.sleep(min(seconds, 1e-4))

    def waiting_for(self) -> tuple[int, ...]:
        """Global ranks that have not done their part, as far as this transport can know."""
        return ()


class Finished(Handle):
    """An operation that needed no one else."""

    __slots__ = ("_value",)

    def __init__(self, value: Tensor | None) -> None:
        self._value = value

    def done(self) -> bool:
        return True

    def result(self) -> Tensor | None:
        return self._value


class Then(Handle):
    """An operation followed by a local one that runs when the result is taken."""

    __slots__ = ("_finish", "_first")

    def __init__(self, first: Handle, finish: Callable[[Tensor], Tensor | None]) -> None:
        self._first, self._finish = first, finish

    def done(self) -> bool:
        return self._first.done()

    def result(self) -> Tensor | None:
        value = self._first.result()
        assert value is not None
        return self._finish(value)

    def settle(self, seconds: float) -> None:
        self._first.settle(seconds)

    def waiting_for(self) -> tuple[int, ...]:
        return self._first.waiting_for()


@dataclass(frozen=True, slots=True)
class Signature:
    """What all members of a collective must agree on."""

    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    detail: str = ""

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.operation} {list(self.shape)} {kind} {self.detail}".rstrip()


class Communicator(ABC):
    """The collectives of one group instance on one stream, in issue order; results are new tensors or go in place.

    Transports implement the five primitives below; here `parts` is a contiguous tensor whose dim 0 counts the members.
    """

    __slots__ = ("members", "position", "size")

    def __init__(self, members: tuple[int, ...], rank: int) -> None:
        self.members, self.position, self.size = members, members.index(rank), len(members)

    @abstractmethod
    def _gather(self, value: Tensor, signature: Signature, out: Tensor | None = None) -> Handle:
        """[*shape] of every member -> [members, *shape]; into `out` if given (then `value` may be a view of it)."""

    @abstractmethod
    def _exchange(self, parts: Tensor, signature: Signature) -> Handle:
        """Part j goes to member j -> [members, *part] of what each member sent to this one."""

    @abstractmethod
    def _sum_scatter(self, parts: Tensor, signature: Signature) -> Handle:
        """Sum over members of the part that belongs to this one."""

    @abstractmethod
    def _reduce(self, value: Tensor, signature: Signature, in_place: bool) -> Handle:
        """Sum (or maximum, as the signature's detail says) of every member's value."""

    @abstractmethod
    def _broadcast(self, value: Tensor, root: int, signature: Signature) -> Handle:
        """The root's value; `value` has its shape and dtype everywhere."""

    def all_gather(self, value: Tensor, dim: int) -> Handle:
        """Shards concatenated along `dim`, in member order."""
        if self.size == 1:
            return Finished(_copy(value))
        first = self._gather(value.contiguous(), signature("all_gather", value, f"dim={dim}"))
        return Then(first, lambda parts: concatenate(parts, dim))

    def reduce_scatter(self, value: Tensor, dim: int) -> Handle:
        """This member's slice along `dim` of the sum."""
        if self.size == 1:
            return Finished(_copy(value))
        return self._sum_scatter(split(value, dim, self.size), signature("reduce_scatter", value, f"dim={dim}"))

    def all_reduce(self, value: Tensor, op: str) -> Handle:
        """Sum or maximum of every member's value; `op` is `sum` or `max`."""
        if self.size == 1:
            return Finished(_copy(value))
        return self._reduce(value.contiguous(), signature("all_reduce", value, f"op={op}"), in_place=False)

    def all_to_all(self, value: Tensor, split_dim: int, concat_dim: int) -> Handle:
        """Slice `position` along `split_dim` of every member's value, concatenated along `concat_dim`."""
        if self.size == 1:
            return Finished(_copy(value))
        detail = f"split={split_dim} concat={concat_dim}"
        first = self._exchange(split(value, split_dim, self.size), signature("all_to_all", value, detail))
        return Then(first, lambda parts: concatenate(parts, concat_dim))

    def broadcast(self, value: Tensor, root: int) -> Handle:
        """Member `root`'s value; on the others `value` only gives shape and dtype, and may be overwritten."""
        if self.size == 1:
            return Finished(_copy(value))
        return self._broadcast(value.contiguous(), root, signature("broadcast", value, f"root={root}"))

    def all_reduce_in_place(self, buffer: Tensor) -> Handle:
        """The flat buffer becomes the sum of every member's."""
        if self.size == 1:
            return Finished(None)
        return self._reduce(buffer, signature("all_reduce", buffer, "op=sum in place"), in_place=True)

    def reduce_scatter_in_place(self, buffer: Tensor) -> Handle:
        """The own contiguous shard of the flat buffer becomes the sum of every member's; the rest is unspecified."""
        if self.size == 1:
            return Finished(None)
        parts = buffer.view(self.size, -1)
        first = self._sum_scatter(parts, signature("reduce_scatter", buffer, "in place"))
        return Then(first, lambda total: _store(parts[self.position], total))

    def all_gather_in_place(self, buffer: Tensor) -> Handle:
        """The flat buffer is completed from every member's own contiguous shard."""
        if self.size == 1:
            return Finished(None)
        parts = buffer.view(self.size, -1)
        return self._gather(parts[self.position], signature("all_gather", buffer, "in place"), out=parts)


class Channel(ABC):
    """One direction between two ranks on one stream: messages arrive in the order in which they were sent."""

    __slots__ = ()

    @abstractmethod
    def send(self, value: Tensor) -> Handle:
        """Borrows `value` until the handle is done; its result is None."""

    @abstractmethod
    def recv(self, shape: tuple[int, ...], dtype: torch.dtype) -> Handle:
        """Posts the receive at once."""


class Transport(ABC):
    """The communicators and channels of one rank, made before the first step."""

    __slots__ = ("device", "rank")

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank, self.device = rank, device

    @abstractmethod
    def communicator(self, members: tuple[int, ...], stream: str) -> Communicator:
        """The one communicator of this group instance and stream."""

    @abstractmethod
    def channel(self, sender: int, receiver: int, stream: str) -> Channel:
        """The one channel from sender to receiver (one of them this rank) of this stream."""


def signature(operation: str, value: Tensor, detail: str) -> Signature:
    return Signature(operation, tuple(value.shape), value.dtype, detail)


def split(value: Tensor, dim: int, size: int) -> Tensor:
    """[.., size * n, ..] -> contiguous [size, .., n, ..]: equal slices along `dim`, counted by a new first dim."""
    shape = (*value.shape[:dim], size, value.shape[dim] // size, *value.shape[dim + 1 :])
    return value.reshape(shape).movedim(dim, 0).contiguous()


def concatenate(parts: Tensor, dim: int) -> Tensor:
    """[size, .., n, ..] -> [.., size * n, ..]: the slices joined along `dim`."""
    joined = parts.movedim(0, dim).flatten(dim, dim + 1)
    return joined if joined.is_contiguous() else joined.contiguous()


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """Sum from the first to the last; bf16 and f16 are accumulated in float32 and rounded once."""
    dtype = parts[0].dtype
    total = parts[0].float() if dtype in (torch.bfloat16, torch.float16) else parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.to(dtype)


def maximum_in_order(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        torch.maximum(total, part, out=total)
    return total


def _copy(value: Tensor) -> Tensor:
    return value.clone(memory_format=torch.contiguous_format)


def _store(target: Tensor, value: Tensor) -> None:
    target.copy_(value)
