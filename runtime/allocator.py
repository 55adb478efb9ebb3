"""The C allocator of a rank that computes on CPU.

A step frees and takes the same megabytes again and again. Given back to the system at each free, they come back as
page faults, which cost more than many operators (measured: 12,000 faults and 5 % of a small step). So what is freed
is kept, in one heap for all threads: heaps of the transport's threads would keep what each has freed (measured: 6 to
17 MB a rank).

A program's first run is the exception: what was free before it lies otherwise than what steps need (parameters were
drawn), and the tables that kernels make under way come to lie between the values of the step. So in that run free
memory is given back between blocks (measured on a stage whose tensors take 69 MB: a peak of 82 MB, as in later steps,
where it was 89 to 97).
"""

from __future__ import annotations

import ctypes
import resource
import sys
from functools import cache
from typing import Any

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8  # names of glibc's mallopt(3)
_NEVER = (1 << 31) - 1
_LARGEST = 1 << 30
_PAD = 64 << 20


@cache
def keep_freed_memory() -> None:
    """Sets it for this process, once; does nothing where the C library has no such setting, and where data are limited
    (`ulimit -d`): what is kept would count against the limit."""
    mallopt = _function("mallopt")
    if mallopt is None or resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY:
        return
    for name, value in ((_MMAP_THRESHOLD, _LARGEST), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _PAD), (_ARENA_MAX, 1)):
        mallopt(name, value)


def keeps_freed_memory() -> bool:
    """Whether this process was set so."""
    return keep_freed_memory.cache_info().currsize > 0


def give_back_freed_memory() -> None:
    """Returns the pages that are free now to the system; does nothing where the C library cannot."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


def _function(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
