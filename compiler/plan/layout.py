"""Layouts: how a tensor lies on the mesh, one state per axis factor, saying where the value *and its gradient* stand.

    I   replicated, gradient replicated          R   replicated, gradient partial
    V d sharded along dim d                      P   partial (sum), gradient replicated
    M   partial under maximum, no gradient

A layout lists the factors that are not `I`, in mesh order. Conversions between states and their transposes stand in one
table; every collective of a plan's graph comes from it.
"""

from __future__ import annotations

from functools import lru_cache

from titan.compiler.plan.frozen import dataclass

Layout = tuple[tuple[str, str], ...]  # ((factor, state), ...); states "R", "P", "M", "V0", "V1", ...

DUAL = {"I": "I", "R": "P", "P": "R"}


def state(layout: Layout, factor: str) -> str:
    """State of one factor, `I` when not listed."""
    for name, value in layout:
        if name == factor:
            return value
    return "I"


def dual(layout: Layout) -> Layout:
    """Layout of the gradient of a value that lies as `layout`."""
    return tuple((f, DUAL.get(s, s)) for f, s in layout)


@lru_cache(4096)
def sharded_by(layout: Layout, dim: int) -> tuple[str, ...]:
    """Factors that shard a dim, outermost first."""
    return tuple(f for f, s in layout if s == f"V{dim}")


@dataclass(frozen=True, slots=True)
class Conversion:
    """What moves a value from one state to another, and what moves its gradient back; `none` costs nothing."""

    forward: str
    backward: str


CONVERSIONS: dict[tuple[str, str], Conversion] = {
    ("I", "R"): Conversion("none", "all_reduce"),
    ("V", "R"): Conversion("all_gather", "reduce_scatter"),
    ("V", "V"): Conversion("all_to_all", "all_to_all"),
    ("P", "I"): Conversion("all_reduce", "none"),
    ("P", "R"): Conversion("all_reduce", "all_reduce"),
    ("P", "V"): Conversion("reduce_scatter", "all_gather"),
    ("M", "I"): Conversion("all_reduce", "none"),  # under maximum; carries no gradient
}


def conversion(source: str, target: str) -> Conversion | None:
    """Row of the table for two states; None when they are equal.

    Raises KeyError when no conversion exists (a partial gradient cannot be made replicated without a sum).
    """
    return None if source == target else CONVERSIONS[source[0], target[0]]
