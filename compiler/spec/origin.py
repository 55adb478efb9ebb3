"""Where a value of the spec came from: written by the user, by the shipped library, or nobody (a default)."""

from __future__ import annotations

from titan.compiler.plan.frozen import dataclass
from titan.grammar.diagnostics import Span


@dataclass(frozen=True, slots=True)
class Origin:
    """`kind` is "user", "library" or "default"; a default has no place."""

    kind: str
    span: Span | None = None


DEFAULT = Origin("default")
