"""How a layer is cut: what of a strategy decides its price."""

from __future__ import annotations

from typing import NamedTuple


class Cut(NamedTuple):
    """What decides the price of a layer."""

    sequence: int  # filled up to a multiple of its pieces
    tensor: int
    context: int
    sequence_parallel: bool
    context_form: str
    micro_batch: int
    context_heads: int = 1
    zigzag: bool = True
    loss_rows: int = 0
    experts: tuple[int, ...] = (1, 1, 1, 1)  # ranks on data, context, tensor that share experts, expert_tensor; or open

    @property
    def tokens(self) -> int:
        """Of a micro-batch on one rank, gathered for its tensor region."""
        return self.micro_batch * self.sequence // self.context

    @property
    def stream(self) -> int:
        """The same between tensor regions."""
        return self.tokens // self.tensor if self.sequence_parallel else self.tokens

    @property
    def ring(self) -> int:
        """Ranks of a ring; 1 without one."""
        return self.context // self.context_heads if self.context_form == "ring" else 1

    @property
    def exchange(self) -> int:
        """Ranks that exchange heads."""
        return {"heads": self.context, "ring": self.context_heads}.get(self.context_form, 1)
