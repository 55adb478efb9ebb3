"""The interpreter on a plan written by hand, against plain autograd, and on damaged plans."""

from __future__ import annotations

import math
import random

import pytest
import torch
from titan.compiler.plan.opcodes import OPCODES
from titan.compiler.plan.program import Plan
from titan.compiler.plan.text import parse_plan
from titan.grammar.diagnostics import TitanError
from titan.runtime.data import SyntheticSource
from titan.runtime.handlers.table import HANDLERS
from titan.runtime.interpreter import Executable
from titan.runtime.loopback import Deadlock, LoopbackResult, collect_parameters, run_loopback
from titan.runtime.state import allocate
from titan.runtime.transport.loopback import Loopback
from torch import Tensor
from torch.nn import functional

from tests.runtime.hand_plan import GLOBAL_BATCH, HIDDEN, SEQUENCE, VOCABULARY, hand_plan, hand_text

torch.set_num_threads(1)
SOURCE = SyntheticSource(VOCABULARY, seed=3, ignore_fraction=0.3)
Weights = dict[str, Tensor]


def expected_loss(weights: Weights, step: int) -> Tensor:
    """The model in plain torch on the whole global batch."""
    first = step * GLOBAL_BATCH
    tokens, labels = SOURCE.load(range(first, first + GLOBAL_BATCH), 0, SEQUENCE)
    x = functional.embedding(tokens, weights["embed.weight"])
    x = functional.rms_norm(x, (HIDDEN,), weights["final.weight"], 1e-5)
    logits = functional.linear(x, weights["head.weight"])
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def rate(step: int) -> float:
    """0.01 peak, 2 steps of warm-up, cosine to 0.001 over 10 steps."""
    if step < 2:
        return 0.01 * (step + 1) / 2
    return 0.001 + 0.009 * (1 + math.cos(math.pi * (step - 2) / 8)) / 2


class Expected:
    """Losses, norms, gradients and weights of `steps` steps of torch's own AdamW."""

    def __init__(self, start: Weights, steps: int, clip: float | None) -> None:
        self.weights = {n: w.clone().requires_grad_() for n, w in start.items()}
        decayed = [w for n, w in self.weights.items() if n != "final.weight"]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": [self.weights["final.weight"]]}]
        adam = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.gradients: list[Weights] = []
        for step in range(steps):
            adam.zero_grad()
            loss = expected_loss(self.weights, step)
            loss.backward()
            self.gradients.append({n: w.grad.clone() for n, w in self.weights.items() if w.grad is not None})
            self.norms.append(float(torch.nn.utils.clip_grad_norm_(self.weights.values(), clip or math.inf)))
            for group in adam.param_groups:
                group["lr"] = rate(step)
            adam.step()
            self.losses.append(float(loss.detach()))


def close(left: Weights, right: Weights, tolerance: float) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name].detach(), rtol=tolerance, atol=tolerance, msg=name)


def run(plan: Plan, steps: int = 3) -> tuple[Weights, LoopbackResult]:
    states = tuple(allocate(plan, rank) for rank in range(4))
    start = {n: w.clone() for n, w in collect_parameters(states, plan).items()}
    return start, run_loopback(plan, steps, SOURCE, states=states, keep_gradients=True, check=True)


def test_every_opcode_has_a_handler() -> None:
    assert set(HANDLERS) == set(OPCODES)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("clip", ["0.05", "null"])
def test_float64_equals_plain_autograd(sharded: bool, split: bool, clip: str) -> None:
    plan = parse_plan(hand_text("f64", sharded, clip, split))
    start, result = run(plan)
    expected = Expected(start, 3, None if clip == "null" else float(clip))
    assert result.losses == pytest.approx(expected.losses, rel=1e-12)
    assert result.norms == pytest.approx(expected.norms, rel=1e-12)
    for found, wanted in zip(result.gradients, expected.gradients, strict=True):
        close(found, wanted, 1e-12)
    close(collect_parameters(result.states, plan), expected.weights, 1e-11)


def test_float32_is_close_and_bf16_is_near() -> None:
    for dtype, tolerance in (("f32", 1e-5), ("bf16", 3e-2)):
        plan = hand_plan(dtype, sharded=True)
        start, result = run(plan)
        expected = Expected({n: w.double() for n, w in start.items()}, 3, 0.5)
        assert result.losses == pytest.approx(expected.losses, rel=tolerance)
        close({n: w.double() for n, w in collect_parameters(result.states, plan).items()}, expected.weights, tolerance)


def test_masters_keep_what_bf16_cannot_hold() -> None:
    plan = hand_plan("bf16", sharded=True)
    _, result = run(plan, steps=1)
    state = result.states[0]
    master = state.moments["embed"].master
    assert master is not None and not torch.equal(master, state.buffers["p.embed"][:16].float())
    assert torch.equal(master.bfloat16(), state.buffers["p.embed"][:16])


def test_any_order_of_ranks_gives_the_same_bits() -> None:
    plan = hand_plan("f32", sharded=True)
    wanted = collect_parameters(run_loopback(plan, 2, SOURCE).states, plan)
    for seed in range(5):
        result = run_loopback(plan, 2, SOURCE, turn=random.Random(seed).shuffle)
        found = collect_parameters(result.states, plan)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_peak_bytes_are_those_of_the_plans_sizes() -> None:
    result = run_loopback(hand_plan("f64"), 1, SOURCE)
    # stage 0: tokens of both micro-batches (48 each) with one output or gradient (6 * 4 doubles)
    assert result.reports[0][0].peak_bytes == 2 * 48 + 192
    # stage 1: count twice; per micro-batch labels, x, loss, its gradient, and the frame; d.x in the first backward
    frame = 8 * (6 + 24 + 48 + 6 + 6)
    assert result.reports[0][2].peak_bytes == 16 + 2 * (48 + 192 + 8 + 8 + frame) + 192


def test_a_step_that_is_not_finite_is_skipped_on_every_rank() -> None:
    plan = hand_plan("f32", sharded=True)
    states = tuple(allocate(plan, rank) for rank in range(4))
    run_loopback(plan, 1, SOURCE, states=states)
    for rank in (2, 3):
        states[rank].parameters["final.weight"][0] = math.inf
    before = {n: w.clone() for n, w in collect_parameters(states, plan).items()}
    result = run_loopback(plan, 1, SOURCE, states=states, first_step=1)
    assert all(report.skipped for report in result.reports[0])
    assert [state.updates for state in states] == [1, 1, 1, 1]
    close(collect_parameters(states, plan), before, 0.0)


def test_a_crossed_order_is_a_deadlock_with_its_cycle() -> None:
    head, tail = hand_text().rsplit("begin F(0..1) B(0..1) end", 1)
    with pytest.raises(Deadlock) as caught:
        run_loopback(parse_plan(f"{head}begin F(0) B(0) F(1) B(1) end{tail}"), 1, SOURCE)
    cycle = [(rank, text.split(), others) for rank, text, others in caught.value.cycle]
    assert cycle == [(0, ["wait", "<-", "t.x:1?"], (2,)), (2, ["wait", "<-", "t.d.x:0?"], (0,))]
    assert caught.value.diagnostics[0].code == "T612"


@pytest.mark.parametrize(
    ("old", "new", "code", "said"),
    [
        ("free <- x:i\n", "free <- x:i x:i\n", "T610", "x:0 is read after it was freed"),
        ("forward embed x:i <- tokens:i", "forward embed x:i <- labels:i", "T610", "labels:0 is read before"),
        ("free <- d.x:i tokens:i", "free <- d.x:i", "T610", "2 registers are never freed: tokens:0, tokens:1"),
        (
            "optimizer_step ^p.embed ^o.embed",
            "optimizer_step ^p.embed ^o.head",
            "T610",
            "o.head is not declared",
        ),
        ("@all !all op=sum", "@all !all op=max", "T611", "`all_reduce [] float64 op=max` on rank 0"),
        ("@all !all op=sum", "@all !other op=sum", "T612", "waits for"),
        (
            "tensor x f64[1,6,4]",
            "tensor x f32[1,6,4]",
            "T610",
            "x:0 is float64[1, 6, 4], the plan says float32",
        ),
    ],
)
def test_damage_is_named(old: str, new: str, code: str, said: str) -> None:
    text = hand_text()
    assert old in text
    with pytest.raises(TitanError) as caught:
        run_loopback(parse_plan(text.replace(old, new, 1)), 1, SOURCE, check=True)
    assert caught.value.diagnostics[0].code == code
    assert said in caught.value.diagnostics[0].message


def test_position_tells_what_a_rank_waits_for() -> None:
    plan, world = hand_plan(), Loopback()
    executable = Executable(plan, 0, world.transport(0), allocate(plan, 0), SOURCE)
    handle = next(executable.run(0))
    assert not handle.done() and handle.waiting_for() == (2,)
    assert executable.describe(executable.position).split() == ["wait", "<-", "t.x:0?"]


def test_copies_that_differ_are_seen() -> None:
    plan = hand_plan()
    states = tuple(allocate(plan, rank) for rank in range(4))
    states[1].parameters["embed.weight"][2, 3] += 1e-12
    with pytest.raises(TitanError, match=r"embed.weight: the copies on ranks 0 and 1 differ"):
        collect_parameters(states, plan)


def test_delay_is_called_before_every_instruction() -> None:
    seen: list[int] = []
    result = run_loopback(hand_plan(), 1, SOURCE, delay=seen.append)
    assert len(seen) == sum(report.instructions for report in result.reports[0])
