"""The device mesh: named axes, outermost first; ranks, coordinates and groups.

An axis may be split into named factors (`tensor.kv`, `tensor.rep`); a *group* is a product of axes or factors written
with `*` (`data*context`), or one of the plan's declared groups that hold ranks of several pipeline coordinates (`all`,
`tied`).
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from titan.compiler.plan.frozen import dataclass

AXES = ("region", "pipeline", "data", "context", "tensor")


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axis factors with their sizes, outermost first; their product is the world size."""

    factors: tuple[tuple[str, int], ...]

    @property
    def world_size(self) -> int:
        return prod(size for _, size in self.factors)

    def resolve(self, group: str) -> tuple[str, ...]:
        """The factors of a group in mesh order: `tensor` -> (`tensor.kv`, `tensor.rep`) where the axis is split."""
        return _resolve(self.factors, group)

    def size(self, group: str) -> int:
        """Number of ranks in each group of this name; 1 for the empty group."""
        return _size(self.factors, group)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinate of a rank on each factor."""
        found: dict[str, int] = {}
        for name, size in reversed(self.factors):
            rank, found[name] = divmod(rank, size)
        return found

    def coordinate(self, coordinates: dict[str, int], group: str) -> int:
        """Position inside a group (mixed radix, outermost factor first)."""
        chosen, position = self.resolve(group), 0
        for name, size in self.factors:
            if name in chosen:
                position = position * size + coordinates[name]
        return position

    def rank(self, coordinates: dict[str, int]) -> int:
        number = 0
        for name, size in self.factors:
            number = number * size + coordinates[name]
        return number

    def members(self, rank: int, group: str, pipeline: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Global ranks of the group that `rank` belongs to, in group order; `pipeline` restricts that coordinate."""
        chosen = self.resolve(group)
        strides, stride = {}, 1
        for name, size in reversed(self.factors):
            strides[name] = (stride, size)
            stride *= size
        mine = self.coordinates(rank)
        ranks = [rank - sum(mine[name] * strides[name][0] for name in chosen)]
        for name in chosen:
            step, size = strides[name]
            ranks = [
                r + c * step
                for r in ranks
                for c in range(size)
                if not (pipeline and name == "pipeline" and c not in pipeline)
            ]
        return tuple(ranks)

    def peer(self, rank: int, axis: str, offset: int) -> int:
        """The rank `offset` further on an axis, around its end: every axis is a ring."""
        coordinates = self.coordinates(rank)
        coordinates[axis] = (coordinates[axis] + offset) % self.size(axis)
        return self.rank(coordinates)


@lru_cache(4096)
def _resolve(factors: tuple[tuple[str, int], ...], group: str) -> tuple[str, ...]:
    names = group.split("*")
    return tuple(f for f, _ in factors if f in names or f.split(".")[0] in names)


@lru_cache(4096)
def _size(factors: tuple[tuple[str, int], ...], group: str) -> int:
    chosen = _resolve(factors, group)
    return prod(size for f, size in factors if f in chosen)


@dataclass(frozen=True, slots=True)
class Group:
    """A declared group that crosses programs: a product of axes, `pipeline` restricted to some coordinates if given."""

    name: str
    axes: str
    pipeline: tuple[int, ...] = ()


def evaluate(expression: str | int | float | bool, mesh: Mesh, coordinates: dict[str, int]) -> int | float | bool | str:
    """Value of an operand that may be a coordinate expression: `@context*512+@tensor*128`."""
    if not isinstance(expression, str) or not expression.startswith("@"):
        return expression
    total = 0
    for term in expression.split("+"):
        group, _, stride = term[1:].rpartition("*")
        total += mesh.coordinate(coordinates, group) * int(stride)
    return total
