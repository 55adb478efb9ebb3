"""The C allocator of a rank that computes on CPU.

A step frees and takes the same megabytes again and again. Given back to the system at each free, they come back as
page faults, which cost more than many operators (measured: 12,000 faults and 5 % of a small step). So what is freed
is kept; the peak is the same.
"""

from __future__ import annotations

import ctypes
import resource
import sys
from functools import cache

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # names of glibc's mallopt(3)
_NEVER = (1 << 31) - 1
_LARGEST = 1 << 30
_PAD = 64 << 20


@cache
def keep_freed_memory() -> None:
    """Sets it for this process, once; does nothing where the C library has no such setting, and where data are limited
    (`ulimit -d`): what is kept would count against the limit."""
    if not sys.platform.startswith("linux") or resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for name, value in ((_MMAP_THRESHOLD, _LARGEST), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _PAD)):
        mallopt(name, value)
