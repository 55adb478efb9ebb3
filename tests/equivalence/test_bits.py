"""What must agree to the last bit, and how far float32 follows over a hundred steps."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from titan.compiler.lower import lower
from titan.compiler.spec.resolve import resolve
from titan.compiler.spec.schema import Spec
from titan.compiler.strategy import Strategy
from titan.grammar.parser import parse
from titan.runtime.assemble import same_bits
from titan.runtime.data import SyntheticSource

from tests.equivalence.comparison import Repeated, source_of, train_plan, train_reference
from tests.equivalence.configurations import Configuration, single_strategy, spec_of, strategy_of, with_train

torch.set_num_threads(1)

EXACT = """import models.tiny
import clusters.local
model = tiny.exact with { hidden = 16, layers = 2 * dense { ffn = 16, activation = relu } }
cluster = local.cpu with { devices_per_node = 8 }
train { sequence = 16, global_batch = 8, precision = fp32, steps = 2, data = synthetic(64) }
"""

LAYOUTS = {
    "tensor": Strategy(tensor=4, micro_batch=4, micro_batches=2, stages=(2,)),
    "sequence parallel": Strategy(tensor=4, sequence_parallel=True, micro_batch=4, micro_batches=2, stages=(2,)),
    "data": Strategy(data=4, micro_batch=1, micro_batches=2, stages=(2,)),
    "zero": Strategy(data=8, zero=1, micro_batch=1, micro_batches=1, stages=(2,)),
    "context": Strategy(context=4, micro_batch=2, micro_batches=4, stages=(2,)),
    "gpipe": Strategy(pipeline=4, schedule="gpipe", micro_batch=2, micro_batches=4, stages=(0, 1, 1, 0)),
    "1f1b": Strategy(pipeline=3, micro_batch=1, micro_batches=8, stages=(1, 1, 0)),
    "recompute": Strategy(recompute="full", micro_batch=2, micro_batches=4, stages=(2,)),
    "all": Strategy(
        pipeline=2, data=2, context=2, tensor=2, sequence_parallel=True, zero=1, recompute="full", micro_batch=2,
        micro_batches=2, stages=(1, 1),
    ),
}  # fmt: skip


def _exact() -> tuple[Spec, SyntheticSource]:
    """Linear, embedding and ReLU with powers of two; 128 labels, all valid: every sum is exact."""
    return resolve(parse(EXACT, "exact.titan"), Path()), SyntheticSource(64, seed=5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_of_exact_sums_are_bitwise_equal_over_layouts(name: str) -> None:
    spec, source = _exact()
    single = train_plan(lower(spec, single_strategy(spec)), spec, 1, source)
    assert all(float(g.abs().max()) > 0 for g in single.gradients[0].values())
    found = train_plan(lower(spec, LAYOUTS[name]), spec, 1, source)
    assert found.losses == single.losses
    assert found.gradients[0].keys() == single.gradients[0].keys()
    for parameter, gradient in single.gradients[0].items():
        assert same_bits(found.gradients[0][parameter] + 0.0, gradient + 0.0), parameter  # + 0.0: zeros have no sign


def test_the_exact_model_is_exact() -> None:
    """Float64 autograd gives the same numbers, so no float32 sum was rounded."""
    spec, source = _exact()
    plan = lower(spec, single_strategy(spec))
    found = train_plan(plan, spec, 1, source)
    wide = {name: value.double() for name, value in found.initial.items()}
    oracle = train_reference(plan, spec, wide, 1, source)
    for name, gradient in oracle.gradients[0].items():
        assert torch.equal(found.gradients[0][name].double(), gradient), name


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_dropout_draws_the_same_masks_in_every_layout(recompute: str) -> None:
    """A mask that differs in one element changes the loss by far more than rounding in float64 does."""
    base = Configuration(family="dropout", recompute=recompute)
    spec = with_train(spec_of(replace(base, tensor=2, pipeline=2)), global_batch=8, sequence=8)
    layers = spec.model.layer_count
    strategies = [
        single_strategy(spec),
        Strategy(tensor=2, recompute=recompute, micro_batch=4, micro_batches=2, stages=(layers,)),
        Strategy(tensor=2, sequence_parallel=True, recompute=recompute, micro_batch=8, stages=(layers,)),
        Strategy(data=2, context=2, recompute=recompute, micro_batch=2, micro_batches=2, stages=(layers,)),
        Strategy(pipeline=2, recompute=recompute, micro_batch=1, micro_batches=8, stages=(1, layers - 1)),
    ]
    losses = [train_plan(lower(spec, s), spec, 1).losses[0] for s in strategies]
    undropped = replace(spec, model=spec.model.model_copy(update={"dropout": 0.0}))
    plain = train_plan(lower(undropped, single_strategy(spec)), undropped, 1).losses[0]
    assert abs(plain - losses[0]) > 1e-3
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-12)


def test_twenty_runs_in_random_order_give_the_same_bits() -> None:
    """Ranks take turns in random order and sleep at random before instructions."""
    configuration = Configuration(tensor=2, pipeline=2, sequence_parallel=True, tied=True, family="dropout")
    spec = spec_of(configuration, "fp32")
    plan = lower(spec, strategy_of(configuration))
    wanted = train_plan(plan, spec, 1)
    for run in range(20):
        drawn = random.Random(run)

        def delay(position: int, drawn: random.Random = drawn) -> None:
            if drawn.random() < 0.01:
                time.sleep(drawn.random() * 1e-3)

        found = train_plan(plan, spec, 1, turn=drawn.shuffle, delay=delay)
        assert found.losses == wanted.losses and found.norms == wanted.norms
        assert all(same_bits(found.parameters[name], value) for name, value in wanted.parameters.items())


def test_a_hundred_float32_steps_follow_the_single_process_curve() -> None:
    """Rounding grows as training goes on: 1e-5 at first, 1e-3 of the loss after a hundred steps."""
    configuration = Configuration(tensor=2, pipeline=2, sequence_parallel=True, tied=True)
    spec = with_train(spec_of(configuration, "fp32"), steps=100, global_batch=4)
    strategy = replace(strategy_of(configuration), micro_batch=2, micro_batches=2)
    source = Repeated(source_of(spec), 8)
    plan = lower(spec, strategy)
    found = train_plan(plan, spec, 100, source)
    wanted = train_reference(plan, spec, found.initial, 100, source)
    assert wanted.losses[-1] < wanted.losses[0] - 1.0  # it learns
    assert found.losses[:10] == pytest.approx(wanted.losses[:10], rel=1e-5)
    assert found.losses == pytest.approx(wanted.losses, rel=1e-3)
