"""Memory that a public run reported, against the ledger of its plan; each test bears the id of its case."""

from __future__ import annotations

import pytest
from titan.compiler.lower import lower
from titan.compiler.plan.sizes import memory_by_component
from titan.compiler.spec.resolve import resolve
from titan.compiler.strategy import Strategy
from titan.grammar.parser import parse

SPEC = """
import clusters.nvidia
model = model {
    vocab = 50257, hidden = 11600, norm = layer_norm, positions = none, max_positions = 2048, tied = true
    attention = gqa { heads = 80, bias = true, out_bias = true }
    layers = 64 * dense { ffn = 46400, activation = gelu_tanh, bias = true }
}
cluster = nvidia.dgx_h100 with { nodes = 16 }
train {
    sequence = 2048, global_batch = 64, precision = bf16, steps = 1
    optimizer = adamw { learning_rate = 1e-4 }
}
"""


def test_S_IMB_01_edge_stages_hold_the_embedding_beside_their_layers() -> None:
    """104B on 4 x 32 ranks, 18 bytes per parameter: (2 * 1,614,870,800 [+ 582,981,200]) / 4 * 18."""
    spec = resolve(parse(SPEC, "case.titan"))
    plan = lower(spec, Strategy(pipeline=32, tensor=4, micro_batches=64, stages=(2,) * 32))
    states = []
    for role in plan.roles:
        held = memory_by_component(plan, role)
        states.append((held["parameters"] + held["gradients"] + held["optimizer"]) / 1e9)
    assert states[1] == pytest.approx(14.53, rel=0.01) and states[30] == pytest.approx(14.53, rel=0.01)
    assert states[0] == pytest.approx(17.16, rel=0.01) and states[31] == pytest.approx(17.16, rel=0.01)
    assert 2 < states[0] - states[1] < 6
