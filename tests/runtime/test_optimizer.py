"""The optimizer on flat ranges against torch's AdamW, the schedule against torch's schedulers, the norm's parts."""

from __future__ import annotations

import math

import pytest
import torch
from titan.compiler.plan.mesh import Mesh
from titan.compiler.plan.operators import TensorType
from titan.compiler.plan.program import Bucket, Buffer, Parameter, Plan, Role
from titan.runtime import optimizer
from titan.runtime.assemble import same_bits
from titan.runtime.optimizer import BucketOptimizer, Training, counted_range, sum_of_squares
from titan.runtime.state import State, allocate, refresh_master
from torch import Tensor

torch.set_num_threads(1)

SETTINGS = {
    "train.learning_rate": "0.02",
    "train.min_learning_rate": "0.002",
    "train.warmup_steps": "3",
    "train.steps": "9",
    "train.schedule": '"cosine"',
    "train.beta1": "0.8",
    "train.beta2": "0.9",
    "train.eps": "1e-6",
    "train.weight_decay": "0.3",
    "train.clip": "null",
    "train.seed": "1",
}


def plan(dtype: str = "f64", ranks: int = 1, sharded: bool = False, clip: str = "null", uncounted: str = "") -> Plan:
    """One bucket of 24 elements on `ranks` data ranks: two decayed matrices, a vector that is not, 2 of padding."""
    mesh, statistic = Mesh((("pipeline", 1), ("data", ranks), ("tensor", 2))), "f64" if dtype == "f64" else "f32"
    held, kinds = ("data", ("o",)) if sharded else ("", ())
    bucket = Bucket("b", 24, dtype, (), "data", held, kinds, uncounted, (0,))
    shapes = (("w1", (3, 4), 0, True), ("w2", (2, 2), 12, True), ("gain", (6,), 16, False))
    parameters = tuple(
        Parameter(name, shape, shape[0], TensorType(dtype, shape), "b", offset, decay, "normal:0.5")
        for name, shape, offset, decay in shapes
    )
    local, copies = 24 // ranks if sharded else 24, 2 if dtype == statistic else 3
    buffers = (
        Buffer("p.b", "parameters", dtype, 24),
        Buffer("g.b", "gradients", statistic, 24),
        Buffer("o.b", "optimizer", statistic, copies * local),
    )
    settings = tuple({**SETTINGS, "train.clip": clip}.items())
    return Plan(1, settings, mesh, (), (), (bucket,), parameters, (), (Role(0, (), buffers, (), ()),))


def gradient(step: int, state: State) -> None:
    for k, value in enumerate(state.gradients.values()):
        generator = torch.Generator().manual_seed(100 * step + k)
        value.copy_(torch.randn(value.shape, generator=generator, dtype=torch.float64))


def torch_adamw(start: dict[str, Tensor], steps: int, clip: float | None) -> dict[str, Tensor]:
    """torch.optim.AdamW, unfused, with clip_grad_norm_ and rates written out."""
    weights = {n: w.clone().requires_grad_() for n, w in start.items()}
    groups = [
        {"params": [weights["w1"], weights["w2"]], "weight_decay": 0.3},
        {"params": [weights["gain"]], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=0.02, betas=(0.8, 0.9), eps=1e-6, foreach=False, fused=False)
    for step in range(steps):
        for k, weight in enumerate(weights.values()):
            generator = torch.Generator().manual_seed(100 * step + k)
            weight.grad = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight.dtype)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(weights.values(), clip)
        for group in adam.param_groups:
            group["lr"] = (
                0.02 * (step + 1) / 3 if step < 3 else 0.002 + 0.009 * (1 + math.cos((step - 3) / 6 * math.pi))
            )
        adam.step()
    return {n: w.detach() for n, w in weights.items()}


def train(made: Plan, rank: int, steps: int) -> State:
    state = allocate(made, rank)
    bucket = BucketOptimizer(made, made.buckets[0], state)
    for step in range(steps):
        gradient(step, state)
        before = state.buffers["g.b"].clone()
        bucket.step(step, math.sqrt(float(sum_of_squares(state.buffers["g.b"]))))
        assert same_bits(before, state.buffers["g.b"])  # read only
        state.updates += 1
    return state


@pytest.mark.parametrize("clip", [None, 0.7])
@pytest.mark.parametrize("chunk", [5, 1 << 18])
def test_float64_equals_torch_adamw(clip: float | None, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "CHUNK", chunk)
    made = plan(clip="null" if clip is None else str(clip))
    expected = torch_adamw({n: w.clone() for n, w in allocate(made, 0).parameters.items()}, 6, clip)
    state = train(made, 0, 6)
    for name, value in expected.items():
        torch.testing.assert_close(state.parameters[name], value, rtol=1e-13, atol=1e-13)
    assert state.buffers["p.b"][22:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_shards_equal_the_whole_to_the_bit(dtype: str) -> None:
    """Three data ranks: the cuts at 8 and 16 fall inside a matrix and between decay rules."""
    whole = train(plan(dtype, 1, clip="0.7"), 0, 4).buffers["p.b"]
    for position in range(3):
        made = plan(dtype, 3, sharded=True, clip="0.7")
        rank = position * 2
        part = train(made, rank, 4).buffers["p.b"]
        assert same_bits(part[8 * position : 8 * position + 8], whole[8 * position : 8 * position + 8])


def test_master_weights_follow_float32_and_round_once() -> None:
    made = plan("bf16")
    state = train(made, 0, 4)
    master = state.moments["b"].master
    assert master is not None and same_bits(master.bfloat16(), state.buffers["p.b"])
    start = {n: w.float() for n, w in allocate(made, 0).parameters.items()}
    expected = torch_adamw(start, 4, None)
    torch.testing.assert_close(master[:12].view(3, 4), expected["w1"], rtol=1e-5, atol=1e-6)
    state.parameters["gain"].fill_(3.0)
    refresh_master(made, made.buckets[0], state)
    assert master[16:22].tolist() == [3.0] * 6


def test_schedule_equals_torchs_schedulers() -> None:
    training = Training.of(plan())
    adam = torch.optim.SGD([torch.zeros(1)], lr=0.02)
    warm = torch.optim.lr_scheduler.LinearLR(adam, 1 / 3, 1.0, 2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 6, 0.002)
    both = torch.optim.lr_scheduler.SequentialLR(adam, [warm, cosine], [3])
    for step in range(9):
        assert training.learning_rate_at(step) == pytest.approx(adam.param_groups[0]["lr"], rel=1e-12), step
        adam.step()
        both.step()
    assert training.learning_rate_at(9) == training.learning_rate_at(1000) == pytest.approx(0.002)


def test_clip_factor_is_torchs() -> None:
    training = Training.of(plan(clip="0.7"))
    weight = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    for size in (0.1, 0.4, 5.0):
        weight.grad = torch.full((3,), size, dtype=torch.float64)
        norm = float(torch.nn.utils.clip_grad_norm_([weight], 0.7))
        assert float(weight.grad[0]) == pytest.approx(size * training.clip_factor(norm), rel=1e-14)


def test_sum_of_squares_stays_exact_over_many_elements() -> None:
    """Four million times 0.1 squared: a running float32 sum would be off in the third digit."""
    flat = torch.full((1 << 22,), 0.1)
    assert float(sum_of_squares(flat)) == pytest.approx(float(flat[0]) ** 2 * (1 << 22), rel=1e-12)


def test_each_gradient_is_counted_once() -> None:
    """Replicas and copies count on coordinate 0 only; shards count everywhere, stages at their first home."""
    copied = plan(ranks=2, uncounted="data*tensor")
    counted = [counted_range(copied, copied.buckets[0], copied.mesh.coordinates(rank)) for rank in range(4)]
    assert counted == [(0, 24), None, None, None]
    shards = plan(ranks=2, sharded=True, uncounted="tensor")
    counted = [counted_range(shards, shards.buckets[0], shards.mesh.coordinates(rank)) for rank in range(4)]
    assert counted == [(0, 12), None, (12, 24), None]
    assert counted_range(shards, shards.buckets[0], {"pipeline": 1, "data": 0, "tensor": 0}) is None
