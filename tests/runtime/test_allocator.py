"""Freed memory: kept from step to step, given back when asked and in a first step; by what the system counts as
resident."""

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

STEPS = """
import torch
from pathlib import Path
from titan.runtime.allocator import keep_freed_memory
from tests.benchmarks.pipelines import contenders

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) >> 10

torch.set_num_threads(1)
plan = contenders.plan_of(contenders.strategy_of("one_f_one_b", 8), 8)
start = status("VmRSS")
keep_freed_memory()
stage = contenders.titan_contender("", plan, 0, contenders.Nobody(0, torch.device("cpu")), 8)
for _ in range(2):
    Path("/proc/self/clear_refs").write_text("5")
    stage.step()
    print(status("VmHWM") - start)
"""

needs_glibc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
needs_room = pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY, reason="data are limited"
)


@needs_glibc
@needs_room
def test_freed_memory_stays_until_it_is_given_back() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    full, freed, given_back = (int(word) >> 20 for word in found.stdout.split())
    assert full >= 64 and freed >= 64
    assert given_back < 8


@needs_glibc
@needs_room
def test_a_first_step_holds_no_more_than_the_next() -> None:
    found = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    first, second = map(int, found.stdout.split())
    assert 60 < first <= second + 2
