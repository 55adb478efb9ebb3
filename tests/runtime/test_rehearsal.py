"""A rehearsed rank trains to the same bits as one that was not, and one that cannot hold its step fails by itself."""

from __future__ import annotations

import pytest
import torch
from titan.compiler.lower import lower
from titan.runtime.assemble import same_bits
from titan.runtime.loopback import run_loopback
from titan.runtime.rehearsal import rehearse
from titan.runtime.state import allocate, fill

from tests.equivalence.comparison import source_of
from tests.equivalence.configurations import Configuration, spec_of, strategy_of

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "c",
    [
        Configuration(pipeline=2, schedule="dualpipe", tied=True),
        Configuration(data=2, zero=3, offload="both"),
        Configuration(context=2, tensor=2, context_form="ring", recompute="adaptive"),
    ],
    ids=str,
)
def test_a_rehearsal_leaves_nothing_behind(c: Configuration) -> None:
    spec = spec_of(c, "bf16")
    plan, source = lower(spec, strategy_of(c)), source_of(spec)
    states = []
    for rank in range(plan.mesh.world_size):
        state = allocate(plan, rank, initialize=False)
        rehearse(plan, state, source, CPU)
        assert state.updates == 0 and not any(buffer.any() for buffer in state.buffers.values())
        fill(plan, state)
        states.append(state)
    rehearsed, plain = run_loopback(plan, 2, source, states=tuple(states)), run_loopback(plan, 2, source)
    assert rehearsed.losses == plain.losses and rehearsed.norms == plain.norms
    for a, b in zip(rehearsed.states, plain.states, strict=True):
        assert all(same_bits(value, b.buffers[name]) for name, value in a.buffers.items())
