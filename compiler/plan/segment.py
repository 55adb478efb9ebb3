"""Segments: the largest pieces of a chunk with no communication inside; a body of operator calls, bound to a layer.

One template serves all layers of one shape. A parameter formal that starts with `.` belongs to the layer of the
binding: `.attn.q.weight` bound by unit `s0.l5` is `layers.5.attn.q.weight`; other formals are full names.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from titan.compiler.plan.operators import OPERATORS, Attribute, Operator, TensorType


@dataclass(frozen=True, slots=True)
class Call:
    """`results = operator operands {attributes}` on values of the segment's body."""

    operator: str
    results: tuple[str, ...]
    operands: tuple[str, ...]
    attributes: tuple[tuple[str, Attribute], ...] = ()

    @property
    def row(self) -> Operator:
        return OPERATORS[self.operator]


@dataclass(frozen=True)
class Segment:
    """A template. `values` types every value of the body: inputs, parameters, intermediates, outputs."""

    name: str
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    outputs: tuple[str, ...]
    body: tuple[Call, ...]
    values: tuple[tuple[str, TensorType], ...]

    @cached_property
    def types(self) -> dict[str, TensorType]:
        return dict(self.values)

    @cached_property
    def differentiable(self) -> frozenset[str]:
        """Values that carry a gradient: reached from a parameter or a differentiable input, not read as data only."""
        found = {v for v in (*self.inputs, *self.parameters) if self.types[v].dtype not in ("i64", "i32", "u8")}
        for call in self.body:
            row = call.row
            sources = [o for n, o in zip(row.operands, call.operands, strict=True) if n not in row.data]
            if row.differentiable and any(o in found for o in sources):
                found.update(call.results[: len(row.main_results)])
        used = self.parameters + tuple(self._gradient_reads(found))
        return frozenset(v for v in found if v in used or v in self.outputs)

    def _gradient_reads(self, found: set[str]) -> list[str]:
        return [
            operand
            for call in self.body
            if call.row.differentiable
            for name, operand in zip(call.row.operands, call.operands, strict=True)
            if name not in call.row.data and operand in found
        ]

    @cached_property
    def kept(self) -> tuple[str, ...]:
        """Values that the backward needs, in body order (parameters excluded)."""
        needed: dict[str, None] = {}
        for call in self.body:
            row = call.row
            named = dict(zip(row.operands + row.results, call.operands + call.results, strict=True))
            for name in row.saves + row.saves_weight:
                if named[name] not in self.parameters:
                    needed[named[name]] = None
        return tuple(needed)

    @cached_property
    def frame(self) -> tuple[str, ...]:
        """Kept values that live inside the segment only: the saved frame of one micro-batch."""
        return tuple(v for v in self.kept if v not in self.inputs and v not in self.outputs)

    @cached_property
    def kept_inputs(self) -> tuple[str, ...]:
        return tuple(v for v in self.inputs if v in self.kept)

    @cached_property
    def kept_outputs(self) -> tuple[str, ...]:
        return tuple(v for v in self.outputs if v in self.kept)

    @cached_property
    def weight_frame(self) -> tuple[str, ...]:
        """Values handed from backward_input to backward_weight: kept operands and output gradients (`d.` prefix)."""
        needed: dict[str, None] = {}
        for call in self.body:
            row = call.row
            if row.parameters and not row.weight_with_input:
                named = dict(zip(row.operands + row.results, call.operands + call.results, strict=True))
                for name in row.saves_weight:
                    needed[named[name]] = None
                needed["d." + call.results[0]] = None
        return tuple(needed)

    @cached_property
    def early_parameters(self) -> frozenset[str]:
        """Parameters whose gradient comes with backward_input (norms, biases, positions)."""
        return frozenset(
            operand
            for call in self.body
            if call.row.weight_with_input
            for name, operand in zip(call.row.operands, call.operands, strict=True)
            if name in call.row.parameters
        )

    def bytes_of(self, names: tuple[str, ...]) -> int:
        return sum(self.types[n.removeprefix("d.")].bytes for n in names)


def bind(formal: str, layer: int | None) -> str:
    """Full parameter name of a formal in a layer."""
    return f"layers.{layer}{formal}" if formal.startswith(".") else formal


def parse_unit(unit: str) -> tuple[str, int | None]:
    """`s0.l5` -> (`s0`, 5); `head` -> (`head`, None)."""
    name, mark, layer = unit.rpartition(".l")
    return (name, int(layer)) if mark and layer.isdigit() else (unit, None)
