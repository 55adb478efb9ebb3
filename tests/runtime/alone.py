"""One rank alone: a transport that answers for the absent ranks, and a count of the bytes of tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from titan.compiler.plan.program import Plan
from titan.runtime import state as states
from titan.runtime.data import SyntheticSource
from titan.runtime.host import HostLink
from titan.runtime.interpreter import Executable
from titan.runtime.operators import rope
from titan.runtime.transport.base import Communicator, Handle, Signature
from titan.runtime.transport.echo import EchoBackend
from titan.runtime.transport.echo import EchoTransport as Echo
from titan.runtime.transport.process_group import ProcessGroupCommunicator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True, slots=True)
class Sent:
    """A collective: bytes of the whole tensor, and bytes that one rank sends in a ring."""

    stream: str
    kind: str
    whole: int
    wire: int


class _Backend(EchoBackend):
    def __init__(self, members: int, stream: str, sent: list[Sent]) -> None:
        super().__init__(members)
        self._stream, self._sent = stream, sent

    def note(self, kind: str, whole: int, passes: int) -> None:
        self._sent.append(Sent(self._stream, kind, whole, passes * whole * (self._members - 1) // self._members))


class EchoCommunicator(ProcessGroupCommunicator):
    """The communicator of real processes on CPU, over a backend that answers itself; notes what is asked of it."""

    __slots__ = ("_echo",)

    def __init__(self, members: tuple[int, ...], rank: int, stream: str, sent: list[Sent]) -> None:
        self._echo = _Backend(len(members), stream, sent)
        super().__init__(members, rank, self._echo, torch.device("cpu"))

    def _gather(self, value: Tensor, signature: Signature, out: Tensor | None = None) -> Handle:
        if signature.operation == "all_gather":  # else a sum of little data
            self._echo.note("all_gather", value.nbytes * self.size, 1)
        return super()._gather(value, signature, out)

    def _exchange(self, parts: Tensor, signature: Signature) -> Handle:
        if signature.operation == "all_to_all":
            self._echo.note("all_to_all", parts.nbytes, 1)
        return super()._exchange(parts, signature)

    def _sum_scatter(self, parts: Tensor, signature: Signature) -> Handle:
        self._echo.note("reduce_scatter", parts.nbytes, 1)
        return super()._sum_scatter(parts, signature)

    def _reduce(self, value: Tensor, signature: Signature, in_place: bool) -> Handle:
        self._echo.note("all_reduce", value.nbytes, 2)
        return super()._reduce(value, signature, in_place)

    def _broadcast(self, value: Tensor, root: int, signature: Signature) -> Handle:
        self._echo.note("broadcast", value.nbytes, 1)
        return super()._broadcast(value, root, signature)


class EchoTransport(Echo):
    """`sent` is what the rank communicated, in order of issue."""

    __slots__ = ("sent",)

    def __init__(self, rank: int) -> None:
        super().__init__(rank, torch.device("cpu"))
        self.sent: list[Sent] = []

    def communicator(self, members: tuple[int, ...], stream: str) -> Communicator:
        return EchoCommunicator(members, self.rank, stream, self.sent)


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


def beside(run: Callable[..., tuple[Tensor, ...]], *given: Tensor) -> int:
    """The most bytes beside the operands that a call holds, less what it gives in the end."""
    with Storages() as storages:
        own = [x.clone() for x in given]
        storages.peak = start = storages.live
        results = run(*own)
    return storages.peak - start - sum(x.nbytes for x in results)


class Pools(Storages):
    """Storages of the device; those of host memory are counted by `host`."""

    def __init__(self) -> None:
        super().__init__()
        self.host = Storages()
        self._inside = False
        self._patches = [
            mock.patch.object(owner, name, self._within(getattr(owner, name)))
            for owner, name in ((HostLink, "_to_host"), (states, "host_zeros"))
        ]

    def __enter__(self) -> Pools:
        for patch in self._patches:
            patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for patch in self._patches:
            patch.stop()

    def _within(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            self._inside = True
            try:
                return function(*arguments)
            finally:
                self._inside = False

        return run

    def _see(self, storage: torch.UntypedStorage) -> None:
        if self._inside or storage._cdata in self.host._known:
            self.host._see(storage)
        else:
            super()._see(storage)


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of tensors that one rank holds on its device: `buffers` by the first letter of their names, `resting` the
    most between two instructions of a step, `peak` the most at any time in it."""

    buffers: dict[str, int]
    resting: int
    peak: int


def hold(plan: Plan, vocabulary: int, rank: int) -> Held:
    """Runs the rank alone and counts in its second step, when everything lasting is made."""
    rope._table.cache_clear()
    resting = 0
    with Pools() as storages:

        def between(position: int) -> None:
            nonlocal resting
            resting = max(resting, storages.live)

        state = states.allocate(plan, rank)
        here = {buffer.name for buffer in plan.role_of(rank).buffers if buffer.place == "device"}
        buffers = dict.fromkeys("pgo", 0)
        for name, value in state.buffers.items():
            if name in here:
                buffers[name[0]] = buffers.get(name[0], 0) + value.nbytes
        assert storages.live == sum(buffers.values())
        source = SyntheticSource(vocabulary, seed=1)
        executable = Executable(
            plan,
            rank,
            EchoTransport(rank),
            state,
            source,
            delay=between,
            watermark=lambda _: None,  # type: ignore[arg-type,return-value]
        )
        for step in range(2):
            storages.peak, resting = storages.live, 0
            for handle in executable.run(step):
                raise AssertionError(f"nothing is waited for here, but {handle}")
    return Held(buffers, resting, storages.peak)
