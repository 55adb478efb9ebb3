"""What the user asks of the parallel layout: one wish per choice, `auto` where the search decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from titan.compiler.plan.frozen import dataclass
from titan.grammar.diagnostics import Span


@dataclass(frozen=True, slots=True)
class Wish:
    """`relation` is auto, =, <=, >= or in; `values` holds the one or the listed values (a stage list is one value)."""

    relation: str = "auto"
    values: tuple[Any, ...] = ()
    span: Span | None = None

    @property
    def fixed(self) -> bool:
        """True when only one value is left."""
        return self.relation in ("=", "in") and len(self.values) == 1

    @property
    def value(self) -> Any:
        """The one value of a fixed wish, else None."""
        return self.values[0] if self.fixed else None

    def allows(self, value: Any) -> bool:
        """Does `value` satisfy the wish?"""
        return _HOLDS[self.relation](value, self.values)

    def __str__(self) -> str:
        listed = ", ".join(_text(value) for value in self.values)
        return {"auto": "= auto", "in": f"in [{listed}]"}.get(self.relation, f"{self.relation} {listed}")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "[" + ", ".join(map(str, value)) + "]" if isinstance(value, tuple) else str(value)


_HOLDS: dict[str, Callable[[Any, tuple[Any, ...]], bool]] = {
    "auto": lambda value, values: True,
    "=": lambda value, values: bool(value == values[0]),
    "<=": lambda value, values: bool(value <= values[0]),
    ">=": lambda value, values: bool(value >= values[0]),
    "in": lambda value, values: value in values,
}

AUTO = Wish()


@dataclass(frozen=True, slots=True)
class Parallel:
    """Degrees are called by their mesh axis. Words: context_form gathered|heads|ring,
    context_order zigzag|contiguous, schedule a name of `schedules`, gather and reduce each|once (of ZeRO),
    recompute none|selective|full|adaptive, offload none|optimizer|activations|both; `chunks` per pipeline rank;
    `late_check`: optimizer steps do not wait for the norm; `stages` is the layers of each chunk."""

    region: Wish = AUTO
    pipeline: Wish = AUTO
    data: Wish = AUTO
    context: Wish = AUTO
    tensor: Wish = AUTO
    expert: Wish = AUTO
    expert_tensor: Wish = AUTO
    sequence_parallel: Wish = AUTO
    context_form: Wish = AUTO
    context_heads: Wish = AUTO
    context_order: Wish = AUTO
    loss_rows: Wish = AUTO
    zero: Wish = AUTO
    shard: Wish = AUTO
    gather: Wish = AUTO
    reduce: Wish = AUTO
    prefetch: Wish = AUTO
    schedule: Wish = AUTO
    chunks: Wish = AUTO
    recompute: Wish = AUTO
    offload: Wish = AUTO
    micro_batch: Wish = AUTO
    stages: Wish = AUTO
    late_check: Wish = AUTO

    def items(self) -> tuple[tuple[str, Wish], ...]:
        return tuple((f.name, getattr(self, f.name)) for f in fields(self))
