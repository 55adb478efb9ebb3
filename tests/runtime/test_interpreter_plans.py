"""Compiled plans on loopback in float64 against one process of plain PyTorch: loss, gradients, norm, parameters."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from titan.compiler.lower import lower
from titan.compiler.plan.program import Plan
from titan.compiler.spec.resolve import load_spec
from titan.compiler.spec.schema import Spec
from titan.compiler.strategy import Strategy
from titan.runtime.assemble import same_bits
from titan.runtime.data import SyntheticSource
from titan.runtime.loopback import collect_parameters, run_loopback
from titan.runtime.reference import ReferenceTraining
from titan.runtime.state import allocate

torch.set_num_threads(1)

_SPEC = """import models.tiny
import clusters.local
model   = tiny.{model}
cluster = local.cpu with {{ devices_per_node = {devices} }}
train {{
    sequence     = 16
    global_batch = 8
    precision    = {precision}
    optimizer    = adamw {{ learning_rate = 1e-2 }}
    warmup_steps = 2
    steps        = 6
    data         = synthetic(64)
}}
"""
STEPS = 2


@cache
def spec(folder: Path, model: str, precision: str, devices: int) -> Spec:
    path = folder / f"{devices}.titan"
    path.write_text(_SPEC.format(model=model, precision=precision, devices=devices))
    return load_spec(path)


def plan(folder: Path, model: str, precision: str = "fp64", **choices: Any) -> Plan:
    strategy = Strategy(**choices)
    found = spec(folder, model, precision, strategy.world_size)
    layers = sum(group.count for group in found.model.layers)
    each, rest = divmod(layers, strategy.pipeline)
    stages = tuple(each + (k < rest) for k in range(strategy.pipeline))
    micro_batches = 8 // strategy.data // strategy.micro_batch
    return lower(found, dataclasses.replace(strategy, stages=stages, micro_batches=micro_batches))


SMALL = (
    " with { vocab = 61, hidden = 16, layers = 3 * dense { ffn = 24 }, attention = gqa { heads = 4, kv_heads = 2 } }"
)
LLAMA = "llama" + SMALL
GPT2 = (
    "gpt2 with { vocab = 61, hidden = 16, dropout = 0.2, attention = gqa { heads = 4, bias = true, out_bias = true }, "
    "layers = 3 * dense { ffn = 24, activation = gelu_tanh, bias = true } }"
)
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    (LLAMA, {}),
    (LLAMA, {"data": 2, "micro_batch": 2}),
    (LLAMA, {"data": 4, "zero": 1}),
    (LLAMA, {"tensor": 2}),
    (LLAMA, {"tensor": 4, "sequence_parallel": True}),
    (LLAMA, {"context": 4}),
    (LLAMA, {"pipeline": 3, "schedule": "gpipe"}),
    (LLAMA, {"pipeline": 2, "data": 2, "recompute": "full"}),
    (LLAMA, {"pipeline": 2, "data": 2, "context": 2, "tensor": 2, "zero": 1, "sequence_parallel": True}),
    (GPT2, {}),
    (GPT2, {"pipeline": 3, "data": 2, "zero": 1}),
    (GPT2, {"pipeline": 2, "tensor": 2, "context": 2, "sequence_parallel": True}),
    (GPT2, {"tensor": 4, "data": 2}),
)


@pytest.mark.parametrize(("model", "choices"), CASES, ids=lambda v: v.split()[0] if isinstance(v, str) else repr(v))
def test_float64_equals_one_process(model: str, choices: dict[str, Any], tmp_path: Path) -> None:
    made = plan(tmp_path, model, **choices)
    source = SyntheticSource(61, seed=5, ignore_fraction=0.25)
    states = tuple(allocate(made, rank) for rank in range(made.mesh.world_size))
    start = {n: p.clone() for n, p in collect_parameters(states, made).items()}
    result = run_loopback(made, STEPS, source, states=states, keep_gradients=True, check=True)
    training = ReferenceTraining(made.setting_table, start)
    for step in range(STEPS):
        samples = range(8 * step, 8 * step + 8)
        expected = training.step(*source.load(samples, 0, 16), samples, step)
        assert result.losses[step] == pytest.approx(expected.loss, rel=1e-12)
        assert result.norms[step] == pytest.approx(expected.norm, rel=1e-11)
        assert result.gradients[step].keys() == expected.gradients.keys()
        for name, value in expected.gradients.items():
            torch.testing.assert_close(result.gradients[step][name], value, rtol=1e-9, atol=1e-12, msg=name)
    after = collect_parameters(states, made)
    for name, parameter in training.parameters.items():
        torch.testing.assert_close(after[name], parameter.detach(), rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize(
    "choices", [{"data": 2, "zero": 1}, {"pipeline": 2, "tensor": 2, "sequence_parallel": True}, {"data": 4}]
)
def test_exact_arithmetic_gives_the_same_bits_in_every_layout(choices: dict[str, Any], tmp_path: Path) -> None:
    """Sums of powers of two are exact: gradients equal those of one rank to the bit."""
    source = SyntheticSource(64, seed=5)
    one = run_loopback(plan(tmp_path, "exact", "fp64"), 1, source, keep_gradients=True).gradients[0]
    found = run_loopback(plan(tmp_path, "exact", "fp64", **choices), 1, source, keep_gradients=True).gradients[0]
    assert any(value.any() for value in one.values())
    assert {name for name, value in one.items() if not same_bits(value, found[name])} == set()


def test_evaluation_changes_nothing_and_gives_the_training_loss(tmp_path: Path) -> None:
    made = plan(tmp_path, LLAMA, pipeline=2, data=2, zero=1)
    source = SyntheticSource(61, seed=5)
    states = tuple(allocate(made, rank) for rank in range(4))
    before = {name: buffer.clone() for name, buffer in states[0].buffers.items()}
    evaluated = run_loopback(made, 1, source, "evaluate", states, check=True)
    assert all(same_bits(before[name], buffer) for name, buffer in states[0].buffers.items())
    assert [state.updates for state in states] == [0, 0, 0, 0]
    trained = run_loopback(made, 1, source, states=states)
    assert evaluated.losses == trained.losses
