"""The model graph: values with named dims, operators, conversions; in parts (embedding, one layer of each kind, head).

Identical layers are one part: everything is derived once for a kind of layer and bound to each layer when lowered.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from math import prod

from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.layout import Layout, sharded_by
from titan.compiler.plan.mesh import Mesh
from titan.compiler.plan.operators import OPERATORS, Attribute, Operator, TensorType
from titan.compiler.plan.segment import Segment


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the graph: global shape with one name per dim (`batch`, `sequence`, `hidden`, `heads`, `kv_heads`,
    `ffn`, `vocab`, `position`); `kind` is activation, parameter or data."""

    name: str
    dtype: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    kind: str = "activation"
    layout: Layout = ()
    wide: bool = False  # its gradient is float32 (float64 in a float64 run) whatever its dtype

    def local(self, mesh: Mesh) -> TensorType:
        """The piece on one rank: every dim divided by the factors that shard it."""
        shape = tuple(
            size // prod(mesh.size(f) for f in sharded_by(self.layout, dim)) for dim, size in enumerate(self.shape)
        )
        return TensorType(self.dtype, shape, self.layout)


@dataclass(frozen=True, slots=True)
class Op:
    """An operator's row applied to values. `shards` says for each mesh factor which named dims it shards here."""

    operator: str
    results: tuple[str, ...]
    operands: tuple[str, ...]
    attributes: tuple[tuple[str, Attribute], ...] = ()
    shards: tuple[tuple[str, frozenset[str]], ...] = ()

    @property
    def row(self) -> Operator:
        return OPERATORS[self.operator]

    def sharding(self, factor: str) -> frozenset[str]:
        return dict(self.shards).get(factor, frozenset())

    def shard(self, factor: str, dims: frozenset[str]) -> Op:
        """The same operator with a factor sharding the given dims."""
        return replace(self, shards=(*(s for s in self.shards if s[0] != factor), (factor, dims)))


@dataclass(frozen=True, slots=True)
class Convert:
    """A change of layout: what it does forward and backward (opcode or `none`), over which group, on which dims. A
    `shift` changes no layout: every rank passes its piece to the one `hops` further on the ring `group`, and its
    gradient comes back."""

    result: str
    source: str
    forward: str
    backward: str
    group: str
    source_dim: int | None
    target_dim: int | None
    reduction: str = "sum"
    hops: int = 1


@dataclass(frozen=True)
class Part:
    """A piece of the model in execution order. `repeated` parts are layers."""

    name: str
    repeated: bool
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    values: tuple[Value, ...]
    steps: tuple[Op | Convert | Segment, ...]

    @cached_property
    def table(self) -> dict[str, Value]:
        return {value.name: value for value in self.values}

    @cached_property
    def parameters(self) -> tuple[Value, ...]:
        return tuple(value for value in self.values if value.kind == "parameter")


@dataclass(frozen=True)
class ModelGraph:
    """`chain` is the model in order: (index of the part, layer number or None). `zigzag`: ranks of the ring along which
    the sequence is permuted; 0 in natural order."""

    mesh: Mesh
    parts: tuple[Part, ...]
    chain: tuple[tuple[int, int | None], ...]
    zigzag: int = 0

    def with_parts(self, parts: tuple[Part, ...]) -> ModelGraph:
        return replace(self, parts=parts)


def active_factors(mesh: Mesh) -> tuple[str, ...]:
    """Factors that lay out tensors: all with more than one rank but the pipeline, which divides the chain."""
    return tuple(f for f, size in mesh.factors if size > 1 and f not in ("pipeline", "region"))


def op_labels(op: Op, dims: dict[str, tuple[str, ...]], names: frozenset[str]) -> frozenset[str]:
    """Labels of the operator's signature whose dims carry one of the names; without those that must stay whole."""
    found = set()
    for labels, operand in zip(op.row.labels[0], op.operands, strict=True):
        for label, dim in zip(labels, dims[operand], strict=True):
            if dim in names and label not in op.row.whole:
                found.add(label)
    return frozenset(found)
