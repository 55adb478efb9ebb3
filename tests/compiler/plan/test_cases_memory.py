"""Memory that a public run reported, against the ledger of its plan; each test bears the id of its case."""

from __future__ import annotations

import pytest
from titan.compiler.cost.machine import read_machine
from titan.compiler.cost.memory import communicator_count
from titan.compiler.lower import lower
from titan.compiler.plan.sizes import Sizes
from titan.compiler.spec.resolve import resolve
from titan.compiler.strategy import Strategy
from titan.grammar.parser import parse

from tests.benchmarks.published_runs.held import live_activations
from tests.benchmarks.published_runs.software import Again, Software

SPEC = """
import clusters.nvidia
model = model {
    vocab = 50257, hidden = 11600, norm = layer_norm, positions = none, max_positions = 2048, tied = true
    attention = gqa { heads = 80, bias = true, out_bias = true }
    layers = 64 * dense { ffn = 46400, activation = gelu_tanh, bias = true }
}
cluster = nvidia.dgx_h100 with { nodes = 32, devices_per_node = 4, memory_reserved = 1.3 GB }
train {
    sequence = 2048, global_batch = 64, precision = bf16, steps = 1
    optimizer = adamw { learning_rate = 1e-4 }
}
"""


def test_S_IMB_01_edge_stages_hold_the_embedding_beside_their_layers() -> None:
    """104B on 4 x 32 ranks, 18 bytes per parameter: (2 * 1,614,870,800 [+ 582,981,200]) / 4 * 18; measured on devices,
    with layers run again in backward and a context of 1.3 GB: 22 GB at the edges, 18 GB in the middle."""
    spec = resolve(parse(SPEC, "case.titan"))
    plan = lower(spec, Strategy(pipeline=32, tensor=4, micro_batches=64, stages=(2,) * 32))
    machine, sizes = read_machine(plan.setting("cluster")), Sizes(plan)
    states, peaks = [], []
    for role in plan.roles:
        held = sum(buffer.bytes for buffer in role.buffers)
        states.append(held / 1e9)
        tensors = held + live_activations(plan, role, sizes, Software("flash2", again=Again(1.0, 1.0, 1.0, 1.0, 1.0)))
        communicators = communicator_count(plan, role) * machine.figures["communicator_bytes"]
        outside = communicators + machine.reserved
        peaks.append((tensors * (1 + machine.figures["allocator_slack"]) + outside) / 1e9)
    assert states[1] == pytest.approx(14.53, rel=0.01) and states[30] == pytest.approx(14.53, rel=0.01)
    assert states[0] == pytest.approx(17.16, rel=0.01) and states[31] == pytest.approx(17.16, rel=0.01)
    assert peaks[0] == pytest.approx(22, rel=0.2) and peaks[31] == pytest.approx(22, rel=0.2)
    assert peaks[1:31] == pytest.approx([18] * 30, rel=0.2)
    assert 2 < peaks[0] - peaks[1] < 6 and 2 < peaks[31] - peaks[30] < 6
