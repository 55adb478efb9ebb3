"""Copies between a device and host memory: asynchronous, in order, one queue to the host and one from it.

On CUDA the host's side is pinned memory of torch's caching allocator, and each direction a stream of its own: a copy
waits on its stream for what was issued before, and the wait for it is one of streams too, not of this thread. On a
machine without accelerators host memory is a second set of storages: what is offloaded is really gone from the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from titan.runtime.transport.base import Finished, Handle
from torch import Tensor

Value = Any  # a tensor, or the tensors of a frame
HOST = torch.device("cpu")


def host_zeros(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A flat buffer in host memory that copies to and from the device can go on from at once."""
    return torch.zeros(elements, dtype=dtype, pin_memory=device.type == "cuda")


def to_device(value: Tensor, device: torch.device) -> Tensor:
    """`value`, which is in host memory, on the device; on CUDA the compute stream waits for the copy, this thread does
    not."""
    return value if device.type == "cpu" else value.pin_memory().to(device, non_blocking=True)


class _Copied(Handle):
    """A copy on a stream: the rest of the device's work waits for it, this thread does not."""

    __slots__ = ("_event", "_value")

    def __init__(self, value: Value, event: torch.cuda.Event) -> None:
        self._value, self._event = value, event

    def done(self) -> bool:
        return True

    def result(self) -> Value:
        torch.cuda.current_stream().wait_event(self._event)
        return self._value


class HostLink:
    """The two queues of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        cuda = device.type == "cuda"
        self._out: torch.cuda.Stream | None = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self._in: torch.cuda.Stream | None = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]

    def offload(self, value: Value) -> Handle:
        """A copy of a register's value in host memory."""
        return self._run(self._out, lambda: _each(value, self._to_host))

    def prefetch(self, value: Value) -> Handle:
        """A copy on the device of a value in host memory."""
        fresh = _each(value, lambda tensor: torch.empty_like(tensor, device=self.device, pin_memory=False))
        return self._run(self._in, lambda: _both(fresh, value))

    def store(self, value: Tensor, buffer: Tensor) -> Handle:
        """Back into a buffer in host memory; there is no value to take."""

        def copy() -> None:
            buffer.copy_(value, non_blocking=True)

        return self._run(self._out, copy)

    def _to_host(self, tensor: Tensor) -> Tensor:
        fresh = torch.empty_like(tensor, device=HOST, pin_memory=self._out is not None)
        return fresh.copy_(tensor, non_blocking=True)

    def _run(self, stream: torch.cuda.Stream | None, copy: Callable[[], Value]) -> Handle:
        if stream is None:
            return Finished(copy())
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            value = copy()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        return _Copied(value, event)


def _each(value: Value, change: Callable[[Tensor], Tensor]) -> Value:
    return tuple(map(change, value)) if isinstance(value, tuple) else change(value)


def _both(fresh: Value, value: Value) -> Value:
    """`fresh` with the contents of `value`."""
    pairs = zip(fresh, value, strict=True) if isinstance(value, tuple) else ((fresh, value),)
    for target, source in pairs:
        target.copy_(source, non_blocking=True)
    return fresh
