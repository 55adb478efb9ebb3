"""Attention over the squares that a mask leaves: each is computed by a kernel and merged by its log-sum-exp.

Tensors are [batch, length, heads * head_dim] as in the plan, `lse` is [batch, heads, queries]. Results and gradients
are float32, or float64 in a float64 run, whatever the operands: they are sums of many parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from titan.compiler.plan.mask import Square
from titan.runtime.attention_blocks import attention_block, attention_block_backward
from titan.runtime.dtypes import statistics
from titan.runtime.place import Attributes, Saved
from torch import Tensor

Seen = Iterable[tuple[slice, Square]]  # samples of the batch, and queries and keys of these that see each other
Operands = tuple[Tensor, Tensor, Tensor]  # q, k, v
Place = Callable[[Tensor], Tensor]  # a view of some queries or keys


def everywhere(squares: Iterable[Square]) -> Seen:
    """The same squares in every sample."""
    return ((slice(None), square) for square in squares)


def attention_of(attributes: Attributes, operands: Operands, seen: Seen) -> tuple[Tensor, Tensor]:
    """(out as q, lse): zero and minus infinity where nothing is seen."""
    q = operands[0]
    dtype, heads = statistics(q.dtype), q.shape[2] // int(attributes["head_dim"])
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full((q.shape[0], heads, q.shape[1]), -torch.inf, dtype=dtype, device=q.device)
    merge_into(attributes, operands, seen, out, lse)
    return out, lse


def merge_into(attributes: Attributes, operands: Operands, seen: Seen, out: Tensor, lse: Tensor) -> None:
    """Merges further keys into the attention so far."""
    queries, keys, values, target = (by_heads(x, attributes) for x in (*operands, out))
    for samples, square in seen:
        rows, columns = _places(samples, square)
        block, block_lse = _turned(attention_block, square, rows(queries), columns(keys), columns(values))
        before, part = rows(lse.unsqueeze(-1)).squeeze(-1), rows(target)
        total = torch.logaddexp(before, block_lse)
        part.mul_((before - total).exp().unsqueeze(-1))
        part.addcmul_(block.to(out.dtype), (block_lse - total).exp().unsqueeze(-1))
        before.copy_(total)


def gradients_of(attributes: Attributes, saved: Saved, gradient: Tensor, seen: Seen) -> Operands:
    """Gradients of q, k and v from the final `out` and `lse`."""
    q, k, v = saved["q"], saved["k"], saved["v"]
    dtype = statistics(q.dtype)
    found = tuple(torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format) for x in (q, k, v))
    queries, keys, values, out, given = (by_heads(x, attributes) for x in (q, k, v, saved["out"], gradient))
    dq, dk, dv = (by_heads(x, attributes) for x in found)
    lse = saved["lse"].unsqueeze(-1)
    for samples, square in seen:
        rows, columns = _places(samples, square)
        parts = _turned(
            attention_block_backward, square, rows(given), rows(queries), columns(keys), columns(values), rows(out),
            rows(lse).squeeze(-1).contiguous(),
        )  # fmt: skip
        for whole, place, part in zip((dq, dk, dv), (rows, columns, columns), parts, strict=True):
            place(whole).add_(part)
    return found  # type: ignore[return-value]


def by_heads(x: Tensor, attributes: Attributes) -> Tensor:
    """[batch, length, heads * d] -> [batch, heads, length, d], without a copy."""
    return x.view(x.shape[0], x.shape[1], -1, int(attributes["head_dim"])).transpose(1, 2)


def _turned(kernel: Callable[..., tuple[Tensor, ...]], square: Square, *tensors: Tensor) -> tuple[Tensor, ...]:
    """A kernel on a square, or on a row of them as samples of one batch. Read backwards, queries that see the keys from
    their own on see those up to it."""
    row = int(square.repeats > 1)
    given = [(t.flip(2 + row) if square.late else t).flatten(0, row) for t in tensors]
    found = kernel(*given, square.causal or square.late)
    del given  # copies, where they were turned
    found = tuple(t.flip(2) for t in found) if square.late else found
    return tuple(t.view(*tensors[0].shape[:2], *t.shape[1:]) for t in found) if square.repeats > 1 else found


def _places(samples: slice, square: Square) -> tuple[Place, Place]:
    """Views of the queries, and of the keys, of a square in [batch, heads, length, d]; of a row of squares
    [batch, repeats, heads, length, d]."""

    def view(first: int, length: int) -> Place:
        if square.repeats == 1:
            return lambda x: x[samples].narrow(2, first, length)
        reach = (square.repeats - 1) * square.stride + length

        def row(x: Tensor) -> Tensor:
            return x[samples].narrow(2, first, reach).unfold(2, length, square.stride).permute(0, 2, 1, 4, 3)

        return row

    return view(square.query, square.queries), view(square.key, square.keys)
