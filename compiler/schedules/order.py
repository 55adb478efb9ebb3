"""A schedule is an order: per pipeline rank, a list of (phase, chunk, micro-batch). Nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Element:
    """`phase` is F (forward), B (full backward), I (backward to inputs), W (backward to weights)."""

    phase: str
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.phase}{self.chunk}.{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Order:
    """`ranks[r]` is what pipeline rank r does; `placement[c]` the rank that holds chunk c."""

    placement: tuple[int, ...]
    ranks: tuple[tuple[Element, ...], ...]


Schedule = Callable[[int, int], Order]  # (pipeline ranks, micro-batches) -> Order


@lru_cache(maxsize=8)
def forward_only(placement: tuple[int, ...], micro_batches: int) -> Order:
    """The order of an evaluation: every chunk's forwards, micro-batch by micro-batch."""
    held = [[c for c, rank in enumerate(placement) if rank == r] for r in range(max(placement) + 1)]
    return Order(
        placement, tuple(tuple(Element("F", c, i) for i in range(micro_batches) for c in mine) for mine in held)
    )
