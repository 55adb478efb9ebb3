"""One step of a rank by itself before it meets the others.

A CUDA device loads a kernel when it is first asked for, and waits for all that runs on it to do so. A step posts its
receives early; two ranks that hold each other's first message would then never load the kernels that make it. After a
rehearsal everything is loaded, libraries have their workspaces, and the allocator has the memory of a step: a rank that
cannot hold its plan fails here, by itself.
"""

from __future__ import annotations

import gc

import torch
from titan.compiler.plan.program import Plan
from titan.runtime.data import TokenSource
from titan.runtime.drive import drive
from titan.runtime.interpreter import Executable
from titan.runtime.state import State
from titan.runtime.transport.echo import EchoTransport


def rehearse(plan: Plan, state: State, source: TokenSource, device: torch.device) -> None:
    """A training step over zeros, which leaves zeros."""
    drive(Executable(plan, state.rank, EchoTransport(state.rank, device), state, source), 0)
    for buffer in state.buffers.values():
        buffer.zero_()
    state.updates = 0
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
