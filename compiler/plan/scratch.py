"""What one call of a body forms beside its results: wide copies of narrow values, pieces of logits, weight products."""

from __future__ import annotations

from math import prod

from titan.compiler.plan.attention import attention_scratch
from titan.compiler.plan.operators import DTYPE_BYTES, statistics_dtype
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
    """What an operator forms beside its results: wide copies of narrow values, pieces of logits, parts of attention."""
    named = {n: segment.types[v] for n, v in zip(call.row.operands, call.operands, strict=True)}
    first = next(iter(named.values()))
    wide = DTYPE_BYTES[statistics_dtype(first.dtype)]
    narrow = DTYPE_BYTES[first.dtype] < wide
    if call.operator == "rms_norm":
        if backward:
            return first.elements * (3 * wide - DTYPE_BYTES[first.dtype] if narrow else wide)
        return 2 * first.elements * wide if narrow else 0
    if call.operator == "add_positions_documents":  # a row for each token; their gradients in float32
        return (narrow * wide * first.elements) if backward else first.bytes
    if call.operator == "rope":  # the halves swapped; of narrow values the result in float32 too
        return first.elements * (DTYPE_BYTES[first.dtype] + (wide if narrow else 0))
    if call.operator == "dropout":  # 64 random bits for two elements, twice while they are drawn, from counters
        return max(0, first.elements * (8 - DTYPE_BYTES[first.dtype]) + 4 * first.elements // first.shape[0])
    if call.operator.startswith("attention") and "lse" in call.row.auxiliary:
        keys = named["kv"] if "kv" in named else named["k"]
        return attention_scratch(call.attributes, named["q"], keys, "starts" in named, "partial" in named, backward)
    if call.operator == "vocab_sum":
        pieces = (1 if narrow else 0) if backward else (2 if narrow else 1)
        return min(first.elements, PIECE) * wide * pieces
    return _logits(segment, call)


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
    """Of an embedding: the tokens' rows, and a copy of the gradients where they are narrow, or where ranks share the
    table and those of other ranks' tokens count nothing."""
    tokens, result = segment.types[call.operands[0]], segment.types[call.results[0]]
    wide = DTYPE_BYTES[statistics_dtype(result.dtype)]
    copied = DTYPE_BYTES[result.dtype] < wide or dict(call.attributes).get("start", 0) != 0
    return tokens.bytes + 3 * tokens.elements + copied * wide * result.elements
