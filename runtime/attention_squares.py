"""Attention over the squares that a mask leaves: each is computed by a kernel and merged by its log-sum-exp.

Tensors are [batch, length, heads * head_dim] as in the plan, `lse` is [batch, heads, queries]. Results and gradients
that are sums of several parts are float32, or float64 in a float64 run, whatever the operands; what a single square
gives has their dtype. How much of all this is held at once, `titan.compiler.plan.attention` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from titan.compiler.plan.mask import Square
from titan.runtime.attention_blocks import Block, attention_block, attention_block_backward, merge
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
    """(out as q, lse): zero and minus infinity where nothing is seen. What a first square of all queries gives is what
    the others are merged into."""
    q, squares = operands[0], list(seen)
    dtype = statistics(q.dtype)
    if squares and _has_all(q, *squares[0]):
        out, lse = _block(attributes, operands, *squares.pop(0))
        out = joined(out) if not squares else joined(out).to(dtype)
    else:
        heads = q.shape[2] // int(attributes["head_dim"])
        out = torch.zeros(q.shape, dtype=dtype, device=q.device)
        lse = torch.full((q.shape[0], heads, q.shape[1]), -torch.inf, dtype=dtype, device=q.device)
    merge_into(attributes, operands, squares, out, lse)
    return out, lse


def merge_into(attributes: Attributes, operands: Operands, seen: Seen, out: Tensor, lse: Tensor) -> None:
    """Merges further keys into the attention so far."""
    target = by_heads(out, attributes)
    for samples, square in seen:
        rows, _ = _places(samples, square)
        merge((rows(target), _rows_of(lse, rows)), _block(attributes, operands, samples, square))


def gradients_of(
    attributes: Attributes, saved: Saved, gradient: Tensor, seen: Seen, dkv: Tensor | None = None
) -> Operands:
    """Gradients of q, k and v from the final `out` and `lse`; those of k and v are added to `dkv` where it is given."""
    whole, squares = (saved["q"], saved["k"], saved["v"]), tuple(seen)
    dtype = whole[0].dtype if len(squares) == 1 else statistics(whole[0].dtype)
    sums: list[Tensor | None] = [None, *((None, None) if dkv is None else dkv)]
    for samples, square in squares:
        rows, columns = _places(samples, square)
        parts = _block_gradients(attributes, saved, gradient, square, rows, columns)
        for n, place in enumerate((rows, columns, columns)):
            sums[n] = _added(sums[n], parts[n], whole[n], place, dtype, attributes)
        del parts  # before those of the next
    return tuple(_zeros(x, dtype) if d is None else d for d, x in zip(sums, whole, strict=True))  # type: ignore[return-value]


def by_heads(x: Tensor, attributes: Attributes) -> Tensor:
    """[batch, length, heads * d] -> [batch, heads, length, d], without a copy."""
    return x.view(x.shape[0], x.shape[1], -1, int(attributes["head_dim"])).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    """Transpose of `by_heads`; a copy only where the kernel laid its result out differently."""
    return x.transpose(1, 2).flatten(2).contiguous()


def _has_all(whole: Tensor, samples: slice, square: Square) -> bool:
    """Whether a square has every query of every sample."""
    batch, length, _ = whole.shape
    return len(range(batch)[samples]) == batch and square.repeats * square.queries == length and square.repeats == 1


def _block(attributes: Attributes, operands: Operands, samples: slice, square: Square) -> Block:
    rows, columns = _places(samples, square)
    q, k, v = (by_heads(x, attributes) for x in operands)
    return _turned(attention_block, square, rows(q), columns(k), columns(v))  # type: ignore[return-value]


def _block_gradients(
    attributes: Attributes, saved: Saved, gradient: Tensor, square: Square, rows: Place, columns: Place
) -> tuple[Tensor, ...]:
    given, q, k, v, out = (by_heads(x, attributes) for x in (gradient, *(saved[n] for n in ("q", "k", "v", "out"))))
    operands = (rows(given), rows(q), columns(k), columns(v), rows(out), _rows_of(saved["lse"], rows).contiguous())
    return _turned(attention_block_backward, square, *operands)


def _added(
    total: Tensor | None, part: Tensor, whole: Tensor, place: Place, dtype: torch.dtype, attributes: Attributes
) -> Tensor:
    """The sum of gradients of `whole` with one part more; a first part of all of it is that sum."""
    if total is None and part.dim() == 4 and part.numel() == whole.numel():
        return joined(part).to(dtype)
    found = _zeros(whole, dtype) if total is None else total
    place(by_heads(found, attributes)).add_(part)
    return found


def _zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(like.shape, dtype=dtype, device=like.device)


def _rows_of(lse: Tensor, rows: Place) -> Tensor:
    return rows(lse.unsqueeze(-1)).squeeze(-1)


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
