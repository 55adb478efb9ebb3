"""Where a computation stands in the training: what a random number may depend on; and the types of operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

Attributes = Mapping[str, Any]  # of a call, evaluated for this rank: numbers, words, flags
Saved = Mapping[str, Tensor]  # kept values by operand and result name of the operator's row
Gradients = tuple[Tensor, ...]  # of the main results, in order


@dataclass(frozen=True, slots=True)
class Place:
    """Seed and step of the run, and the micro-batch: `samples` are the global sample indices of its rows.

    `layer` is filled in by the bound segment (None outside the layers); dropout is off unless `training`.
    """

    seed: int
    step: int
    samples: tuple[int, ...]
    training: bool = True
    layer: int | None = None

    def at(self, layer: int | None) -> Place:
        return self if layer == self.layer else Place(self.seed, self.step, self.samples, self.training, layer)


class OperatorModule(Protocol):
    """What each file of `runtime/operators` exports; functions of plain tensors that never modify their operands.

    forward          every result of the row, auxiliary ones too
    backward_input   one gradient per operand that is neither data nor parameter
    backward_weight  adds the gradient of each parameter into the float32 (float64) view of the gradient buffer
    backward         only where doing both at once is cheaper
    backward_onto    only where one kernel adds the one input gradient to another's; weights come apart from it
    """

    forward: Callable[..., tuple[Tensor, ...]]
    backward_input: Callable[[Attributes, Place, Saved, Gradients], tuple[Tensor, ...]]
    backward_weight: Callable[[Attributes, Place, Saved, Gradients, tuple[Tensor, ...]], None]
