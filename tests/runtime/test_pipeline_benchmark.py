"""The benchmark of pipelines itself: intervals that cover, contenders that compute what they should."""

from __future__ import annotations

from random import Random

import torch
from titan.runtime.interpreter import Executable
from titan.runtime.loopback import run_step
from titan.runtime.state import allocate
from titan.runtime.transport.loopback import Loopback

from tests.benchmarks.pipelines import model
from tests.benchmarks.pipelines.contenders import Fixed, plan_of, strategy_of
from tests.benchmarks.pipelines.ratios import ratio


def test_intervals_cover_the_median_as_often_as_they_say() -> None:
    random, covered = Random(0), 0
    for _ in range(400):
        found = ratio([random.gauss(1.0, 0.2) for _ in range(15)])
        covered += found.low <= 1.0 <= found.high
    assert covered >= 0.93 * 400
    few = ratio([3.0, 1.0, 2.0])
    assert (few.value, few.low, few.high) == (2.0, 1.0, 3.0)


def test_both_sides_compute_the_same_gradients() -> None:
    """Torch's modules and the plan without its update, from the same parameters and tokens."""
    micro_batches = 2
    plan = plan_of(strategy_of("one_f_one_b", micro_batches), micro_batches)
    states = [allocate(plan, rank, torch.device("cpu")) for rank in (0, 1)]
    modules = [model.stage(rank, (4, 4)) for rank in (0, 1)]
    for rank, module in enumerate(modules):
        for mine, theirs in _pairs(rank, module):
            states[rank].parameters[mine].copy_(theirs.detach())
    world = Loopback("cpu")
    ranks = [Executable(plan, r, world.transport(r), states[r], Fixed(micro_batches)) for r in (0, 1)]
    run_step(ranks, 0)
    tokens, labels = model.batch(micro_batches)
    for x, y in zip(tokens.chunk(micro_batches), labels.chunk(micro_batches), strict=True):
        (model.loss(modules[1](modules[0](x)), y) / micro_batches).backward()
    for rank, module in enumerate(modules):
        for mine, theirs in _pairs(rank, module):
            assert theirs.grad is not None
            largest = float(theirs.grad.abs().max())
            error = float((states[rank].gradients[mine] - theirs.grad).abs().max())
            assert error <= 2e-4 * largest + 1e-7, mine


def _pairs(rank: int, module: torch.nn.Sequential) -> list[tuple[str, torch.nn.Parameter]]:
    """(name in the plan, parameter of the module)."""
    found: list[tuple[str, torch.nn.Parameter]] = []
    layer = 4 * rank
    for part in module:
        if isinstance(part, model.Embedding):
            found += [("embed.weight", part.tokens.weight), ("positions.weight", part.positions.weight)]
        elif isinstance(part, model.Layer):
            inner = {"q": "attn.q", "k": "attn.k", "v": "attn.v", "out": "attn.out", "up": "ffn.up", "down": "ffn.down"}
            for name, parameter in part.named_parameters():
                head, _, tail = name.partition(".")
                found.append((f"layers.{layer}.{inner.get(head, head)}.{tail}", parameter))
            layer += 1
        elif isinstance(part, torch.nn.LayerNorm):
            found += [(f"final_norm.{name}", parameter) for name, parameter in part.named_parameters()]
        else:
            found.append(("head.weight", part.weight))
    return found
