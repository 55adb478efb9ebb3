"""A distributed plan on loopback, the plan of one process, and plain autograd: three answers that must be one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from titan.compiler.lower import lower
from titan.compiler.plan.program import Plan
from titan.compiler.spec.schema import Spec
from titan.compiler.strategy import Strategy
from titan.compiler.verify.proofs import verify
from titan.runtime.data import SyntheticSource, TokenSource
from titan.runtime.loopback import collect_parameters, run_loopback
from titan.runtime.reference import ReferenceTraining
from titan.runtime.state import allocate
from torch import Tensor

from tests.equivalence.configurations import LEARNING_RATE, Configuration, single_strategy, spec_of, strategy_of

Named = Mapping[str, Tensor]
CPU = torch.device("cpu")
TOLERANCE = 1e-9
STEPS = 2
MOVED = (
    STEPS * LEARNING_RATE
)  # how far Adam can move a parameter: key biases have gradients that are nothing but rounding
FLOOR = (
    1e-6  # gradients are compared relative to their own largest entry, but not below this share of the largest of all
)


@dataclass(frozen=True)
class Repeated:
    """The first samples of a source again and again, so that there is something to learn."""

    inner: TokenSource
    period: int

    name = "repeated"

    @property
    def vocabulary(self) -> int:
        return self.inner.vocabulary

    @property
    def tokens(self) -> int:
        return self.inner.tokens

    @property
    def samples(self) -> int:
        return self.inner.samples

    def load(self, indices: Sequence[int], start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self.inner.load([i % self.period for i in indices], start, stop)

    def unigram_entropy(self) -> float:
        return self.inner.unigram_entropy()


@dataclass(frozen=True)
class Training:
    """What a few steps gave; gradients are those before clipping, parameters those at the end."""

    initial: Named
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    gradients: tuple[Named, ...]
    parameters: Named


def source_of(spec: Spec, ignored: float = 0.2) -> SyntheticSource:
    """Random tokens of which a share has no label: micro-batches and ranks differ in how many count."""
    return SyntheticSource(spec.model.vocab, seed=7, ignore_fraction=ignored)


def train_plan(
    plan: Plan, spec: Spec, steps: int = STEPS, source: TokenSource | None = None, **options: Any
) -> Training:
    """All ranks of a plan in this process."""
    states = tuple(allocate(plan, rank, CPU) for rank in range(plan.mesh.world_size))
    initial = {name: value.clone() for name, value in collect_parameters(states, plan).items()}
    result = run_loopback(plan, steps, source or source_of(spec), states=states, keep_gradients=True, **options)
    parameters = collect_parameters(result.states, plan)
    return Training(initial, result.losses, result.norms, result.gradients, parameters)


def train_reference(
    plan: Plan, spec: Spec, initial: Named, steps: int = STEPS, source: TokenSource | None = None
) -> Training:
    """Plain autograd and `torch.optim.AdamW` on the same global batches; the plan only says the settings."""
    training = ReferenceTraining(plan.setting_table, initial, {p.name for p in plan.parameters if p.decay})
    batch, source = spec.train.global_batch, source or source_of(spec)
    done = []
    for step in range(steps):
        samples = range(step * batch, (step + 1) * batch)
        tokens, labels = source.load(samples, 0, spec.train.sequence)
        done.append(training.step(tokens, labels, samples, step))
    losses, norms = tuple(s.loss for s in done), tuple(s.norm for s in done)
    return Training(initial, losses, norms, tuple(s.gradients for s in done), done[-1].parameters)


def plans(spec: Spec, strategy: Strategy) -> tuple[Plan, Plan]:
    """(the plan, the plan of one process)."""
    return lower(spec, strategy), lower(spec, single_strategy(spec))


def mismatches(c: Configuration) -> list[str]:
    """Everything in which loopback, one process and autograd differ by more than 1e-9; empty when they agree."""
    spec = spec_of(c)
    plan, single = plans(spec, strategy_of(c))
    one = train_plan(single, spec)
    oracle = train_reference(single, spec, one.initial)
    found = [f"one process: {line}" for line in differences(one, oracle)]
    return found + differences(train_plan(plan, spec), oracle)


def unproven(plan: Plan) -> list[str]:
    """First finding of every proof that fails."""
    return [f"{name}: {proof.findings[0].message}" for name, proof in verify(plan).items() if not proof.ok]


def differences(found: Training, oracle: Training, tolerance: float = TOLERANCE) -> list[str]:
    """What differs, each with by how much; initial values must be the same to the bit."""
    lines = _tensors("initial", found.initial, oracle.initial, 0.0, 0.0)
    lines += _numbers("loss", found.losses, oracle.losses, tolerance)
    lines += _numbers("norm", found.norms, oracle.norms, tolerance)
    for step, (left, right) in enumerate(zip(found.gradients, oracle.gradients, strict=True)):
        largest = max(float(g.abs().max()) for g in right.values())
        lines += _tensors(f"step {step} gradient", left, right, FLOOR * largest, tolerance)
    return lines + _tensors("parameter", found.parameters, oracle.parameters, MOVED, tolerance)


def _numbers(what: str, left: Sequence[float], right: Sequence[float], tolerance: float) -> list[str]:
    pairs = enumerate(zip(left, right, strict=True))
    return [f"step {i} {what} {a!r}, not {b!r}" for i, (a, b) in pairs if not abs(a - b) <= tolerance * abs(b)]


def _tensors(what: str, left: Named, right: Named, floor: float, tolerance: float) -> list[str]:
    if left.keys() != right.keys():
        return [f"{what}s: {sorted(left.keys() ^ right.keys())}"]
    lines = []
    for name, expected in right.items():
        gap = float((left[name] - expected).abs().max())
        scale = max(floor, float(expected.abs().max()))
        if not gap <= tolerance * scale:
            lines.append(f"{what} {name} off by {gap:.3g} of {scale:.3g}")
    return lines
