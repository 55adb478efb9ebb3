"""What a rank may hold and what it holds now: readings of the device that are cheap enough for every layer."""

from __future__ import annotations

import ctypes
import resource
import sys
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from titan.runtime.allocator import give_back_freed_memory

_PAGE = resource.getpagesize()


class Reading(Protocol):
    """`limit` in bytes; `used` now, given the bytes of registers that the interpreter knows to be live; `release` gives
    back what is free but held. The rest of what is used belongs to whoever else is there."""

    def limit(self) -> int: ...

    def used(self, live: int) -> int: ...

    def release(self) -> None: ...


class CpuReading:
    """The process' own limit (`ulimit -d`) and its data where there is one, else the plan's limit and the ledger.

    The resident size would be useless: it neither falls when tensors end nor rises before they are written.
    """

    def __init__(self, limit: int, buffers: int) -> None:
        self._limit, self._buffers = limit, buffers

    def limit(self) -> int:
        found = resource.getrlimit(resource.RLIMIT_DATA)[0]
        return self._limit if found in (resource.RLIM_INFINITY, -1) else found

    def used(self, live: int) -> int:
        if resource.getrlimit(resource.RLIMIT_DATA)[0] in (resource.RLIM_INFINITY, -1):
            return self._buffers + live
        return data_bytes() - reusable_bytes()

    def release(self) -> None:
        give_back_freed_memory()


class CudaReading:
    """The plan's limit; what the device holds less what torch's allocator could use again."""

    def __init__(self, limit: int, device: torch.device) -> None:
        self._limit, self._device = limit, device

    def limit(self) -> int:
        return self._limit

    def used(self, live: int) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int(total - free - cached)

    def release(self) -> None:
        torch.cuda.empty_cache()


def reading(limit: int, buffers: int, device: torch.device) -> Reading:
    """`limit` of the plan and bytes of its buffers."""
    return CudaReading(limit, device) if device.type == "cuda" else CpuReading(limit, buffers)


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, of torch on either device or of Python."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "not enough memory" in text)


def data_bytes() -> int:
    """What counts against `ulimit -d`."""
    return int(Path("/proc/self/statm").read_bytes().split()[5]) * _PAGE


class _MallocInfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    ))  # fmt: skip


@cache
def _libc() -> ctypes.CDLL | None:
    """The C library, where it is GNU's."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return None
    library.mallinfo2.restype = _MallocInfo
    return library


def reusable_bytes() -> int:
    """Free bytes inside the heap."""
    library = _libc()
    return 0 if library is None else int(library.mallinfo2().fordblks)
