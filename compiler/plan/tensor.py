"""What is known of a tensor on one rank, and of the work of an operator: the words of the operators' table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.layout import Layout

Attribute = int | float | str | bool
Shape = tuple[int, ...]

DTYPE_BYTES = {"f8": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "i64": 8, "i32": 4, "u8": 1}


@dataclass(frozen=True, slots=True)
class TensorType:
    """Local shape of a tensor on one rank, its dtype and how it lies on the mesh."""

    dtype: str
    shape: Shape
    layout: Layout = ()

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations of one call on one rank (multiply and add count two)."""

    forward: float
    backward_input: float = 0.0
    backward_weight: float = 0.0


Typing = Callable[[Mapping[str, Attribute], tuple[TensorType, ...]], tuple[tuple[str, Shape], ...]]
Counting = Callable[[Mapping[str, Attribute], tuple[TensorType, ...]], Flops]


def statistics_dtype(dtype: str) -> str:
    """Statistics and losses are kept in float32, or float64 in a float64 run."""
    return "f64" if dtype == "f64" else "f32"
