"""What one call of a body forms beside its results: wide copies of narrow values, pieces of logits, weight products."""

from __future__ import annotations

from math import prod

from titan.compiler.plan.operators import DTYPE_BYTES, TensorType, statistics_dtype
from titan.compiler.plan.segment import Call, Segment


def _logits(segment: Segment, call: Call) -> int:
    """Logits that are formed in pieces: those of `rows` tokens, and their gradient."""
    rows = dict(call.attributes).get("rows")
    if rows is None:
        return 0
    x, weight = (segment.types[name] for name in call.operands[:2])
    return 2 * min(int(rows), prod(x.shape[:-1])) * weight.shape[0] * DTYPE_BYTES[x.dtype]


PIECE = 1 << 18  # logits whose exponentials are formed at once
ROWS = 4096  # rows of a product that are widened at once


def call_scratch(segment: Segment, call: Call, backward: bool) -> int:
    """What an operator forms beside its results: wide copies of narrow values, pieces of logits, sums over the squares
    of a mask."""
    named = {n: segment.types[v] for n, v in zip(call.row.operands, call.operands, strict=True)}
    first = next(iter(named.values()))
    wide = DTYPE_BYTES[statistics_dtype(first.dtype)]
    narrow = DTYPE_BYTES[first.dtype] < wide
    if call.operator == "rms_norm":
        if backward:
            return first.elements * (3 * wide - DTYPE_BYTES[first.dtype] if narrow else wide)
        return 2 * first.elements * wide if narrow else 0
    if call.operator == "add_positions" and not backward and "zigzag" in dict(call.attributes):  # rows of two stretches
        return first.bytes // first.shape[0]
    if call.operator == "rope":  # the halves swapped; of narrow values the result in float32 too
        return first.elements * (DTYPE_BYTES[first.dtype] + (wide if narrow else 0))
    if call.operator == "dropout":  # 64 random bits for two elements, twice while they are drawn, from counters
        return max(0, first.elements * (8 - DTYPE_BYTES[first.dtype]) + 4 * first.elements // first.shape[0])
    if call.operator.startswith("attention") and ("window" in dict(call.attributes) or "starts" in named):
        return _squares(call, named, wide, backward)
    if call.operator == "vocab_sum":
        pieces = (1 if narrow else 0) if backward else (2 if narrow else 1)
        return min(first.elements, PIECE) * wide * pieces
    return _logits(segment, call)


def _squares(call: Call, named: dict[str, TensorType], wide: int, backward: bool) -> int:
    """Attention square by square: results of the largest before they are added up, and what it reads turned round where
    a window ends; sums in float32 of narrow values, and keys' gradients before they are joined in a ring."""
    q, keys = named["q"].elements, named["kv"].elements if "kv" in named else 2 * named["k"].elements
    size, window = DTYPE_BYTES[named["q"].dtype], "window" in dict(call.attributes)
    narrow = size < wide
    if window and "k" in named:  # a square has no more keys than queries
        queried, held = named["q"].shape[1], named["k"].shape[1]
        turned_keys = keys * min(queried, held) // held
    else:
        turned_keys = keys
    if backward:
        turned = size * (5 * q + 2 * turned_keys if window else q + keys)
        return turned + (wide * keys if "kv" in named else wide * (q + keys) if narrow else 0)
    return size * (2 * q + turned_keys if window else q) + (2 * wide * q if narrow else 0)


def weight_scratch(segment: Segment, call: Call) -> int:
    """What forming weight gradients takes beside their float32 sums: wide copies of narrow rows."""
    if call.row.weight_with_input or not call.row.parameters:
        return 0
    if call.operator == "embedding":
        return _rows(segment, call)
    named = {n: segment.types[v] for n, v in zip(call.row.operands, call.operands, strict=True)}
    weight, result = named[call.row.parameters[0]], segment.types[call.results[0]]
    wide = DTYPE_BYTES[statistics_dtype(weight.dtype)]
    if DTYPE_BYTES[weight.dtype] == wide:
        return 0
    if call.operator != "linear":
        return wide * result.elements
    rows = prod(result.shape[:-1])
    return wide * min(rows, ROWS) * sum(weight.shape)


def _rows(segment: Segment, call: Call) -> int:
    """Of an embedding: the tokens' rows, and of a table that ranks share the gradients of the tokens that are here
    (all, at most); in float32 too where the gradients are narrower."""
    tokens, result = segment.types[call.operands[0]], segment.types[call.results[0]]
    wide = DTYPE_BYTES[statistics_dtype(result.dtype)]
    copies = (dict(call.attributes).get("start", 0) != 0) * DTYPE_BYTES[result.dtype]
    copies += wide if DTYPE_BYTES[result.dtype] < wide else 0
    return 3 * tokens.bytes + copies * result.elements
