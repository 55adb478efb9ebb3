"""One rank per process, over torch's gloo or NCCL backends: one communicator per group instance and stream, one per
channel, all made before the first step in one order that is the same on every rank.

Backends are made directly over a key-value store, so no rank needs to know the groups of others, and a new generation
after a failure only needs a new key prefix. Gloo operations run in a thread of their group and are polled; NCCL ones
are ordered by the device, so a wait there only makes the compute stream wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from titan.compiler.plan.program import Plan
from titan.runtime.allocator import keep_freed_memory
from titan.runtime.transport.base import (
    Channel,
    Communicator,
    Handle,
    Signature,
    Then,
    Transport,
    maximum_in_order,
    sum_in_order,
)
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ReduceOp, Store

Key = tuple[str, tuple[int, ...]]  # stream, and members or (sender, receiver)

SMALL = 1 << 19  # bytes, all members together, up to which a sum gathers everything and adds it up in member order


class ProcessGroupTransport(Transport):
    """The backends of one rank. `store` is any torch store that all ranks share; `generation` separates restarts."""

    __slots__ = ("_channels", "_communicators")

    def __init__(
        self,
        plan: Plan,
        rank: int,
        store: Store,
        device: torch.device | str = "cpu",
        interface: str | None = "lo",
        generation: int = 0,
        timeout: timedelta = timedelta(hours=24),
    ) -> None:
        """`interface` is the network interface of gloo (None: the default one). `timeout` is that of one operation:
        long, because a dead peer is noticed by other means (see `drive`)."""
        super().__init__(rank, torch.device(device))
        if self.device.type == "cpu":
            keep_freed_memory()
        make = backends(self.device, interface, timeout)
        prefixed = PrefixStore(f"titan/{generation}", store)
        self._communicators: dict[Key, ProcessGroupCommunicator] = {}
        self._channels: dict[Key, ProcessGroupChannel] = {}
        for kind, (stream, members) in sorted(set(_keys(plan, rank))):
            if len(members) == 1:
                self._communicators[stream, members] = ProcessGroupCommunicator(members, rank, None, self.device)
                continue
            name = f"{kind}/{stream}/{'_'.join(map(str, members))}"
            backend = make(PrefixStore(name, prefixed), members.index(rank), len(members))
            if kind == "channel":
                self._channels[stream, members] = ProcessGroupChannel(backend, members.index(rank), self.device)
            else:
                self._communicators[stream, members] = ProcessGroupCommunicator(members, rank, backend, self.device)
            if self.device.type == "cuda":
                _meet(backend, kind, members.index(rank), self.device)

    def communicator(self, members: tuple[int, ...], stream: str) -> Communicator:
        return self._communicators[stream, members]

    def channel(self, sender: int, receiver: int, stream: str) -> Channel:
        return self._channels[stream, (sender, receiver)]


def _keys(plan: Plan, rank: int) -> Iterator[tuple[str, Key]]:
    """What a rank's program communicates with. Sorted, these are a part of one order over all ranks, so that ranks that
    make them one after another never wait in a circle."""
    for block in plan.role_of(rank).blocks:
        for instruction in block.instructions:
            if instruction.row.kind == "transfer":
                peer = plan.mesh.peer(rank, instruction.group, int(instruction.attribute("peer")))
                pair = (rank, peer) if instruction.opcode == "send" else (peer, rank)
                yield "channel", (instruction.stream, pair)
            elif instruction.group:
                yield "group", (instruction.stream, plan.group_members(rank, instruction.group))


def backends(device: torch.device, interface: str | None = "lo", timeout: timedelta = timedelta(hours=24)) -> Any:
    """(store, position, size) -> backend: gloo for the CPU, else NCCL."""
    return _gloo(interface, timeout) if device.type == "cpu" else _nccl(timeout)


def _gloo(interface: str | None, timeout: timedelta) -> Any:
    group: Any = dist.ProcessGroupGloo
    options = group._Options()
    device = group.create_device(interface=interface) if interface else group.create_default_device()
    options._devices, options._timeout = [device], timeout
    options._threads = 1  # a stream is in order, so one thread serves it
    return lambda store, position, size: group(store, position, size, options)


def _nccl(timeout: timedelta) -> Any:
    group: Any = dist.ProcessGroupNCCL
    options = group.Options()
    options._timeout = timeout
    return lambda store, position, size: group(store, position, size, options)


def _meet(backend: Any, kind: str, position: int, device: torch.device) -> None:
    """NCCL connects a backend at its first operation and blocks until its peers are there: they are now, in the common
    order; in a program two ranks could each wait for the other's first operation on another one."""
    value = torch.zeros(1, device=device)
    if kind == "group":
        backend.allreduce([value], dist.AllreduceOptions()).wait()
    else:
        (backend.recv([value], 0, 0) if position else backend.send([value], 1, 0)).wait()
    torch.cuda.synchronize(device)


class _Pending(Handle):
    """A torch work object with the tensors that it reads and writes."""

    __slots__ = ("_held", "_polled", "_value", "_work")

    def __init__(self, work: Any, value: Tensor | None, held: Tensor, polled: bool) -> None:
        self._work, self._value, self._held, self._polled = work, value, held, polled

    def done(self) -> bool:
        return not self._polled or bool(self._work.is_completed())

    def settle(self, seconds: float) -> None:
        try:
            self._work.wait(timedelta(seconds=seconds))
        except RuntimeError:  # time is up; an operation that failed is done, and `result` raises what it died of
            return

    def result(self) -> Tensor | None:
        self._work.wait()  # at once: raises what went wrong, or makes the device's stream wait
        return self._value


class ProcessGroupCommunicator(Communicator):
    """Collectives over one backend. On gloo a sum of little data is exact in member order, as on loopback; one of much
    data is the ring's, equal on all members but possibly in another order when there are more than two."""

    __slots__ = ("_backend", "_gloo")

    def __init__(self, members: tuple[int, ...], rank: int, backend: Any, device: torch.device) -> None:
        super().__init__(members, rank)
        self._backend, self._gloo = backend, device.type == "cpu"

    def _pending(self, work: Any, value: Tensor | None, held: Tensor) -> _Pending:
        return _Pending(work, value, held, self._gloo)

    def _gather(self, value: Tensor, signature: Signature, out: Tensor | None = None) -> Handle:
        whole = value.new_empty((self.size, *value.shape)) if out is None else out
        work = self._backend._allgather_base(whole.view(-1), value.view(-1))
        return self._pending(work, whole, value)

    def _exchange(self, parts: Tensor, signature: Signature) -> Handle:
        received = torch.empty_like(parts)
        return self._pending(self._backend.alltoall_base(received, parts, [], []), received, parts)

    def _sum_scatter(self, parts: Tensor, signature: Signature) -> Handle:
        if self._gloo:  # its own reduce-scatter moves twice the bytes
            return Then(self._exchange(parts, signature), lambda received: sum_in_order(received.unbind()))
        own = torch.empty_like(parts[0])
        return self._pending(self._backend._reduce_scatter_base(own, parts), own, parts)

    def _reduce(self, value: Tensor, signature: Signature, in_place: bool) -> Handle:
        maximum = signature.detail == "op=max"
        if self._gloo and value.nbytes * self.size <= SMALL:
            combine = maximum_in_order if maximum else sum_in_order
            if in_place:
                return Then(self._gather(value, signature), lambda parts: _store(value, combine(parts.unbind())))
            return Then(self._gather(value, signature), lambda parts: combine(parts.unbind()))
        narrow = self._gloo and value.dtype in (torch.bfloat16, torch.float16)
        total = value if in_place and not narrow else value.float() if narrow else value.clone()
        options = dist.AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.MAX if maximum else ReduceOp.SUM)
        pending = self._pending(self._backend.allreduce([total], options), total, value)
        if not narrow:
            return pending
        return Then(pending, lambda wide: _store(value, wide) if in_place else wide.to(value.dtype))

    def _broadcast(self, value: Tensor, root: int, signature: Signature) -> Handle:
        copy = value.clone() if root == self.position else value
        return self._pending(_broadcast(self._backend, copy, root), copy, copy)


class ProcessGroupChannel(Channel):
    """A backend of two members, sender and receiver. Gloo's own sends cannot be polled, its broadcasts can."""

    __slots__ = ("_backend", "_device")

    def __init__(self, backend: Any, position: int, device: torch.device) -> None:
        self._backend, self._device = backend, device

    def send(self, value: Tensor) -> Handle:
        if self._device.type == "cpu":
            return _Pending(_broadcast(self._backend, value, 0), None, value, True)
        return _Pending(self._backend.send([value], 1, 0), None, value, False)

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype) -> Handle:
        value = torch.empty(shape, dtype=dtype, device=self._device)
        if self._device.type == "cpu":
            return _Pending(_broadcast(self._backend, value, 0), value, value, True)
        return _Pending(self._backend.recv([value], 0, 0), value, value, False)


def _broadcast(backend: Any, value: Tensor, root: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = root
    return backend.broadcast([value], options)


def _store(target: Tensor, value: Tensor) -> None:
    target.copy_(value)
