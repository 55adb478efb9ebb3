"""A plan executed on loopback against plain single-process autograd: loss, every gradient, norm, updated parameters.

Float64, synthetic tokens with labels ignored here and there, so that ranks hold different numbers of labels that count.
The reference knows nothing of layouts, segments or schedules: one model, one batch, `torch.autograd` and AdamW.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from titan.compiler.plan.program import Plan
from titan.grammar.diagnostics import Diagnostic, TitanError
from titan.runtime.data import SyntheticSource
from titan.runtime.loopback import collect_parameters, run_loopback
from titan.runtime.reference import ReferenceTraining
from titan.runtime.state import allocate
from torch import Tensor

LIMIT = 1e-9
STEPS = 2  # the second meets optimizer state, and parameters that the first has changed
IGNORED_SHARE = 0.25
NOISE = 1e-6  # of the gradient norm: what is below it everywhere is rounding of an exact zero


@dataclass(frozen=True, slots=True)
class Comparison:
    """One value in one step; `error` is relative to the largest element of the expected value."""

    step: int
    name: str
    error: float
    limit: float = LIMIT

    @property
    def ok(self) -> bool:
        return self.error <= self.limit

    def __str__(self) -> str:
        verdict = "" if self.ok else f", at most {self.limit:.0e} is allowed"
        return f"step {self.step + 1}, {self.name}: relative error {self.error:.2e}{verdict}"


def execute_and_compare(plan: Plan, steps: int = STEPS, limit: float = LIMIT) -> tuple[Comparison, ...]:
    """Runs `steps` steps of all ranks in this process. Errors: T605 when the plan does not compute in float64."""
    if plan.setting("train.precision") != "fp64":
        message = f"the plan computes in {plan.setting('train.precision')}; only float64 can be compared to {limit:.0e}"
        raise TitanError(Diagnostic("T605", message))
    torch.set_num_threads(1)
    sequence, batch = int(plan.setting("train.sequence")), int(plan.setting("train.global_batch"))
    source = SyntheticSource(int(plan.setting("model")["vocab"]), seed=1, ignore_fraction=IGNORED_SHARE)
    states = tuple(allocate(plan, rank) for rank in range(plan.mesh.world_size))
    start = {name: value.clone() for name, value in collect_parameters(states, plan).items()}
    decay = {parameter.name for parameter in plan.parameters if parameter.decay}
    training = ReferenceTraining(plan.setting_table, start, decay)
    found: list[Comparison] = []
    for step in range(steps):
        result = run_loopback(plan, 1, source, states=states, first_step=step, keep_gradients=True, check=True)
        samples = range(step * batch, (step + 1) * batch)
        expected = training.step(*source.load(samples, 0, sequence), samples, step)
        rate = float(plan.setting("train.learning_rate"))
        found += [Comparison(step, "loss", _relative(result.losses[0], expected.loss), limit)]
        found += [Comparison(step, "gradient norm", _relative(result.norms[0], expected.norm), limit)]
        found += [
            Comparison(step, name, error, limit)
            for name, error in (
                *_errors("gradient of", result.gradients[0], expected.gradients, NOISE * expected.norm),
                *_errors("updated", collect_parameters(states, plan), expected.parameters, rate),
            )
        ]
    return tuple(found)


def _relative(found: float, expected: float) -> float:
    return abs(found - expected) / max(abs(expected), 1e-300)


def _errors(
    what: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], floor: float
) -> Iterator[tuple[str, float]]:
    """Largest difference of each tensor over its largest element, or over `floor` if that is larger; infinite when one
    side lacks it or it has another shape."""
    for name in dict.fromkeys((*found, *expected)):
        left, right = found.get(name), expected.get(name)
        if left is None or right is None or left.shape != right.shape:
            yield f"{what} {name}", float("inf")
            continue
        scale = max(float(right.abs().max()), floor)
        yield f"{what} {name}", float((left - right).abs().max()) / scale
