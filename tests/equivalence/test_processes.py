"""The same plans on real processes: gloo gives what loopback gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from titan.compiler.lower import lower
from titan.runtime.assemble import same_bits

from tests.equivalence.comparison import FLOOR, differences, source_of, train_plan
from tests.equivalence.configurations import Configuration, spec_of, strategy_of
from tests.equivalence.processes import train_processes

torch.set_num_threads(1)

ROUNDING = 1e-5  # float32 sums in another order; gradients of nothing but rounding have no relative error to speak of

SAMPLE = (
    Configuration(tensor=2, family="gpt2", odd=True),
    Configuration(tensor=4, sequence_parallel=True, family="kv_few", tied=True),
    Configuration(pipeline=3, stages="uneven", tied=True, family="dropout"),
    Configuration(data=2, pipeline=2, zero=1, schedule="gpipe", tied=True),
    Configuration(data=2, context=2, zero=1, recompute="full"),
    Configuration(context=2, tensor=2, context_form="heads", sequence_parallel=True),
)


@pytest.mark.parametrize("configuration", SAMPLE, ids=str)
def test_gloo_equals_loopback(configuration: Configuration, tmp_path: Path) -> None:
    spec = spec_of(configuration, "fp32")
    plan = lower(spec, strategy_of(configuration))
    found = train_processes(plan, source_of(spec), 2, tmp_path)
    wanted = train_plan(plan, spec)
    assert found.losses == pytest.approx(wanted.losses, rel=ROUNDING)
    assert found.norms == pytest.approx(wanted.norms, rel=ROUNDING)
    for left, right in zip(found.gradients, wanted.gradients, strict=True):
        floor = FLOOR * max(float(g.abs().max()) for g in right.values())
        for name, gradient in right.items():
            gap = float((left[name] - gradient).abs().max())
            assert gap <= ROUNDING * max(floor, float(gradient.abs().max())), name


def test_gloo_equals_loopback_in_float64_with_parameters(tmp_path: Path) -> None:
    configuration = Configuration(tensor=2, pipeline=2, sequence_parallel=True, tied=True, odd=True)
    spec = spec_of(configuration)
    plan = lower(spec, strategy_of(configuration))
    found = train_processes(plan, source_of(spec), 2, tmp_path)
    assert differences(found, train_plan(plan, spec)) == []


@pytest.mark.parametrize("seed", range(3))
def test_random_delays_change_no_bit(seed: int, tmp_path: Path) -> None:
    """A wait that is missing in the plan would show: data would be read before it arrived."""
    configuration = Configuration(data=2, pipeline=2, zero=1, tied=True)
    spec = spec_of(configuration, "fp32")
    plan = lower(spec, strategy_of(configuration))
    wanted = train_plan(plan, spec)
    found = train_processes(plan, source_of(spec), 2, tmp_path, seed=seed)
    assert found.losses == wanted.losses and found.norms == wanted.norms
    assert all(same_bits(found.parameters[name], value) for name, value in wanted.parameters.items())
