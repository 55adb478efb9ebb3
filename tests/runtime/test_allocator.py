"""Freed memory: kept from step to step, given back when asked; by what the system counts as resident."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

PROGRAM = """
import torch
from pathlib import Path
from titan.runtime.allocator import give_back_freed_memory, keep_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

keep_freed_memory()
start = resident()
blocks = [torch.ones(1 << 18) for _ in range(64)]  # 64 MiB
last = torch.ones(1 << 10)
full = resident()
del blocks
freed = resident()
give_back_freed_memory()
print(full - start, freed - start, resident() - start)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY, reason="data are limited")
def test_freed_memory_stays_until_it_is_given_back() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    full, freed, given_back = (int(word) >> 20 for word in found.stdout.split())
    assert full >= 64 and freed >= 64
    assert given_back < 8
