"""Segments: the largest pieces of a chunk with no communication inside; a body of operator calls, bound to a layer.

One template serves all layers of one shape. A parameter formal that starts with `.` belongs to the layer of the
binding: `.attn.q.weight` bound by unit `s0.l5` is `layers.5.attn.q.weight`; other formals are full names.
"""

from __future__ import annotations

from functools import cached_property, lru_cache

from titan.compiler.plan.frozen import dataclass
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


TIERS = ("none", "selective", "full")  # of recompute, from storing everything to storing least
PIECES = (("f", "full"), ("fs", "selective"), ("fn", "none"))  # pieces of a frame, and the last tier that stores them


@dataclass(frozen=True, slots=True)
class Rebuild:
    """What a recompute of a segment does in a tier: from `reads` (inputs, and outputs that are stored) and the stored
    pieces of the frame it makes the missing pieces, and the outputs `writes` where they are not stored."""

    tier: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True)
class Segment:
    """A template. `values` types every value of the body: inputs, parameters, intermediates, outputs.

    `finals` are (partial, final): an output that later segments go on with, and the value of a later segment that it
    becomes; backward reads the final value and its gradient in place of the partial one's.

    `drops` are (tier, values of the frame that are stored in the tiers before it only); so a frame has pieces that live
    as long as the tier says, and `rebuilds` say how the missing ones are made again.
    """

    name: str
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    outputs: tuple[str, ...]
    body: tuple[Call, ...]
    values: tuple[tuple[str, TensorType], ...]
    finals: tuple[tuple[str, str], ...] = ()
    drops: tuple[tuple[str, tuple[str, ...]], ...] = ()
    rebuilds: tuple[Rebuild, ...] = ()

    def final(self, value: str) -> str:
        """What a value becomes before backward reads it: itself, unless it is a partial result."""
        for partial, final in self.finals:
            if partial == value:
                return final
        return value

    @cached_property
    def wide(self) -> frozenset[str]:
        """Values whose gradients are float32 or float64 whatever their own dtype."""
        return frozenset(
            value
            for call in self.body
            for name, value in zip(call.row.operands + call.row.results, call.operands + call.results, strict=True)
            if name in call.row.wide
        )

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
                    needed[self.final(named[name])] = None
        return tuple(needed)

    @cached_property
    def pieces(self) -> dict[str, tuple[str, ...]]:
        """Kept values that live inside the segment only, by the prefix of the register that holds them."""
        elsewhere = {*self.inputs, *self.outputs, *(final for _, final in self.finals)}
        dropped = {value: tier for tier, values in self.drops for value in values}
        found: dict[str, list[str]] = {prefix: [] for prefix, _ in PIECES}
        for value in self.kept:
            if value not in elsewhere:
                found[{"selective": "fn", "full": "fs"}.get(dropped.get(value, ""), "f")].append(value)
        return {prefix: tuple(values) for prefix, values in found.items() if values}

    @cached_property
    def frame(self) -> tuple[str, ...]:
        """The saved frame of one micro-batch: all its pieces."""
        return tuple(value for values in self.pieces.values() for value in values)

    def stored(self, tier: str) -> tuple[str, ...]:
        """Prefixes of the pieces that a tier stores."""
        last = dict(PIECES)
        return tuple(p for p in self.pieces if TIERS.index(last[p]) >= TIERS.index(tier))

    def rebuild(self, tier: str) -> Rebuild | None:
        return next((found for found in self.rebuilds if found.tier == tier), None)

    def rebuild_body(self, tier: str) -> tuple[Call, ...]:
        """The calls that a rebuild runs: those that the missing values depend on."""
        found = self.rebuild(tier)
        if found is None:
            return ()
        stored = self.stored(tier)
        given = {*found.reads, *self.parameters, *(v for p in stored for v in self.pieces[p])}
        needed = {*found.writes, *(v for p in self.pieces if p not in stored for v in self.pieces[p])}
        body: list[Call] = []
        for call in reversed(self.body):
            if needed.intersection(call.results):
                body.append(call)
                needed.update(o for o in call.operands if o not in given)
        return tuple(reversed(body))

    @cached_property
    def kept_inputs(self) -> tuple[str, ...]:
        return tuple(v for v in self.inputs if v in self.kept)

    @cached_property
    def kept_outputs(self) -> tuple[str, ...]:
        return tuple(self.final(v) for v in self.outputs if self.final(v) in self.kept)

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

    @cached_property
    def backward_parameters(self) -> tuple[str, ...]:
        """Parameters whose values the backward to inputs reads (an embedding's table and biases are not)."""
        read: set[str] = set()
        for call in self.body:
            named = dict(zip(call.row.operands, call.operands, strict=True))
            read.update(named[name] for name in call.row.saves if name in named)
        return tuple(p for p in self.parameters if p in read)

    def bytes_of(self, names: tuple[str, ...]) -> int:
        return sum(self.types[n.removeprefix("d.")].bytes for n in names)


@lru_cache(1 << 14)
def bind(formal: str, layer: int | None) -> str:
    """Full parameter name of a formal in a layer."""
    return f"layers.{layer}{formal}" if formal.startswith(".") else formal


@lru_cache(1 << 14)
def parse_unit(unit: str) -> tuple[str, int | None]:
    """`s0.l5` -> (`s0`, 5); `head` -> (`head`, None)."""
    name, mark, layer = unit.rpartition(".l")
    return (name, int(layer)) if mark and layer.isdigit() else (unit, None)
