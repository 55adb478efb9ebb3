"""AdamW on flat ranges: learning-rate schedule, clipping, decoupled decay, float32 masters of bf16 parameters.

    lr(s) = peak * (s + 1) / warmup                                              for s < warmup
    lr(s) = floor + (peak - floor) * (1 + cos(pi * t)) / 2,  t = (s - warmup) / (steps - warmup)    cosine, t <= 1
    lr(s) = peak                                                                 constant

with the step s counted from 0. One update with gradient g, clip factor c and update count n (from 1):

    m = b1 m + (1 - b1) c g      v = b2 v + (1 - b2) (c g)^2
    p = p (1 - lr decay) - lr (m / (1 - b1^n)) / (sqrt(v / (1 - b2^n)) + eps)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from titan.compiler.plan.program import Bucket, Plan
from titan.runtime.state import Moments, State, held_slice, moments_of, own_range
from torch import Tensor

CHUNK = 1 << 18  # elements that are clipped at once, so that the scaled copy stays in the cache
LARGE = 1 << 23  # the same on a GPU, which a smaller kernel does not fill


@dataclass(frozen=True, slots=True)
class Training:
    """The optimizer's settings, as in the plan's `train.*`."""

    learning_rate: float
    floor: float
    warmup: int
    steps: int
    schedule: str
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip: float | None

    @classmethod
    def of(cls, plan: Plan) -> Training:
        clip = plan.setting("train.clip")
        return cls(
            learning_rate=float(plan.setting("train.learning_rate")),
            floor=float(plan.setting("train.min_learning_rate", 0.0) or 0.0),
            warmup=int(plan.setting("train.warmup_steps", 0) or 0),
            steps=int(plan.setting("train.steps", 1)),
            schedule=str(plan.setting("train.schedule", "constant")),
            beta1=float(plan.setting("train.beta1", 0.9)),
            beta2=float(plan.setting("train.beta2", 0.95)),
            eps=float(plan.setting("train.eps", 1e-8)),
            weight_decay=float(plan.setting("train.weight_decay", 0.0)),
            clip=None if clip is None else float(clip),
        )

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of step `step`, counted from 0."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        if self.schedule != "cosine":
            return self.learning_rate
        progress = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return self.floor + (self.learning_rate - self.floor) * 0.5 * (1.0 + math.cos(math.pi * progress))

    def clip_factor(self, norm: float) -> float:
        """What gradients are multiplied with, as `torch.nn.utils.clip_grad_norm_` does."""
        return 1.0 if self.clip is None else min(1.0, self.clip / (norm + 1e-6))


def sum_of_squares(flat: Tensor) -> Tensor:
    """Scalar in float64, summed in float64: the norm hardly depends on how a gradient is cut into shards."""
    if flat.device.type != "cpu":
        norm: Tensor = torch.linalg.vector_norm(flat, dtype=torch.float64)
        return norm.square()
    total = torch.zeros((), dtype=torch.float64)
    for part in torch.split(flat, 1 << 16):  # widened piece by piece: the copy stays in the cache
        wide = part.double()
        total += torch.dot(wide, wide)
    return total


def counted_range(plan: Plan, bucket: Bucket, coordinates: dict[str, int]) -> tuple[int, int] | None:
    """Elements [start, stop) of the gradient that this rank counts in the norm; None when another rank does."""
    elsewhere = coordinates.get("pipeline", 0) != bucket.homes[0] and not plan.spans_homes(bucket)
    if elsewhere or (bucket.uncounted and plan.mesh.coordinate(coordinates, bucket.uncounted)):
        return None
    return own_range(plan, bucket, coordinates)


@dataclass(frozen=True, slots=True)
class _Range:
    """Flat views of one stretch with one decay rule."""

    decay: float
    master: Tensor  # what is updated: the parameters themselves, or their float32 copy
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class BucketOptimizer:
    """AdamW for the part of one bucket that this rank owns."""

    def __init__(self, plan: Plan, bucket: Bucket, state: State) -> None:
        self._training = Training.of(plan)
        self._state = state
        start, stop = own_range(plan, bucket, state.coordinates)
        self._moments, self._length = state.moments[bucket.name], stop - start
        self._own = held_slice(plan, bucket, state, "p", start, stop)
        self._gradient = held_slice(plan, bucket, state, "g", start, stop)
        self._stretches = [(d, a - start, b - start) for d, a, b in _decay_ranges(plan, bucket, start, stop)]
        self._ranges = self._bound(self._moments)

    def _bound(self, moments: Moments) -> tuple[_Range, ...]:
        return tuple(self._range(decay, start, stop, moments) for decay, start, stop in self._stretches)

    def _range(self, decay: bool, start: int, stop: int, moments: Moments) -> _Range:
        return _Range(
            self._training.weight_decay if decay else 0.0,
            (self._own if moments.master is None else moments.master)[start:stop],
            self._gradient[start:stop],
            moments.exp_avg[start:stop],
            moments.exp_avg_sq[start:stop],
        )

    def keep(self, into: Tensor) -> None:
        """Copies parameters (or masters) and moments of the own range, one after the other."""
        for row, part in zip(into.view(3, -1), self._parts(), strict=True):
            row.copy_(part)

    def restore(self, kept: Tensor) -> None:
        """Brings back what `keep` has copied, to the bit."""
        for row, part in zip(kept.view(3, -1), self._parts(), strict=True):
            part.copy_(row)
        if self._moments.master is not None:
            self._own.copy_(self._moments.master)

    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        moments = self._moments
        return self._own if moments.master is None else moments.master, moments.exp_avg, moments.exp_avg_sq

    def step(self, step: int, norm: float, state: Tensor | None = None) -> None:
        """One update of the own range; `norm` is that of the whole model's gradient, before clipping. `state`: the flat
        optimizer state, where it is not in its buffer."""
        moments = self._moments if state is None else moments_of(state, self._length)
        ranges = self._ranges if state is None else self._bound(moments)
        factor = self._training.clip_factor(norm)
        rate, count = self._training.learning_rate_at(step), float(self._state.updates + 1)
        scaled = self._scratch() if factor != 1.0 else None
        for piece in ranges:
            if scaled is None:
                self._update(piece, piece.gradient, 0, len(piece.gradient), rate, count)
                continue
            for start in range(0, len(piece.gradient), len(scaled)):
                stop = min(start + len(scaled), len(piece.gradient))
                clipped = torch.mul(piece.gradient[start:stop], factor, out=scaled[: stop - start])
                self._update(piece, clipped, start, stop, rate, count)
        if moments.master is not None:
            self._own.copy_(moments.master)

    def _scratch(self) -> Tensor:
        """Room for a scaled stretch; it lives as long as one update."""
        longest = max((len(piece.gradient) for piece in self._ranges), default=0)
        sample = self._ranges[0].gradient if self._ranges else self._own
        return sample.new_empty(min(longest, CHUNK if sample.device.type == "cpu" else LARGE))

    def _update(self, piece: _Range, gradient: Tensor, start: int, stop: int, rate: float, count: float) -> None:
        t = self._training
        torch._fused_adamw_(
            [piece.master[start:stop]],
            [gradient],
            [piece.exp_avg[start:stop]],
            [piece.exp_avg_sq[start:stop]],
            [],
            [torch.full((), count, device=gradient.device)],
            lr=rate,
            beta1=t.beta1,
            beta2=t.beta2,
            weight_decay=piece.decay,
            eps=t.eps,
            amsgrad=False,
            maximize=False,
        )


def _decay_ranges(plan: Plan, bucket: Bucket, start: int, stop: int) -> Sequence[tuple[bool, int, int]]:
    """(decay, from, to) stretches that cover [start, stop); padding goes with the parameter before it."""
    found: list[tuple[bool, int, int]] = []
    parameters = sorted(plan.bucket_parameters(bucket.name), key=lambda p: p.offset)
    for index, parameter in enumerate(parameters):
        end = parameters[index + 1].offset if index + 1 < len(parameters) else bucket.elements
        first, last = max(parameter.offset, start), min(end, stop)
        if first >= last:
            continue
        if found and found[-1][0] == parameter.decay:
            found[-1] = (parameter.decay, found[-1][1], last)
        else:
            found.append((parameter.decay, first, last))
    return found
