"""What one run of a segment's body costs: FLOPs, and the bytes of body values that no register holds."""

from __future__ import annotations

from math import prod

from titan.compiler.plan.operators import DTYPE_BYTES, Flops, statistics_dtype
from titan.compiler.plan.segment import Call, Segment


def segment_flops(segment: Segment) -> Flops:
    """Work of one run of the segment: forward, gradients of inputs, gradients of weights.

    `backward_input` counts what `backward_input` does: weights of rows in `weight_with_input` are part of their row's
    figure; a product whose gradient nobody needs (an input without gradient) counts nothing.
    """
    forward = inputs = weights = 0.0
    for call in segment.body:
        row = call.row
        found = row.flops(dict(call.attributes), tuple(segment.types[o] for o in call.operands))
        forward += found.forward
        wanted = [
            o
            for n, o in zip(row.operands, call.operands, strict=True)
            if n not in row.data and o in segment.differentiable and (n not in row.parameters or row.weight_with_input)
        ]
        if wanted:
            inputs += found.backward_input
        if row.parameters and not row.weight_with_input:
            weights += found.backward_weight
    return Flops(forward, inputs, weights)


def rebuild_flops(segment: Segment, tier: str) -> float:
    """Work of the calls that are run again in a tier."""
    return sum(
        call.row.flops(dict(call.attributes), tuple(segment.types[o] for o in call.operands)).forward
        for call in segment.rebuild_body(tier)
    )


def _forward_workspace(segment: Segment, body: tuple[Call, ...], retained: set[str]) -> int:
    """Largest sum of body values that are alive at once and not retained by the plan."""
    last = {o: n for n, call in enumerate(body) for o in call.operands}
    live, peak = 0, 0
    inside: dict[str, int] = {}
    for n, call in enumerate(body):
        for value in call.results:
            if value not in retained:
                inside[value] = segment.types[value].bytes
                live += inside[value]
        peak = max(peak, live + _scratch(segment, call, False))
        for value in {*call.operands, *call.results}:
            if value in inside and last.get(value, n) == n:
                live -= inside.pop(value)
    return peak


def _logits(segment: Segment, call: Call) -> int:
    """Logits that are formed in pieces: those of `rows` tokens, and their gradient."""
    rows = dict(call.attributes).get("rows")
    if rows is None:
        return 0
    x, weight = (segment.types[name] for name in call.operands[:2])
    return 2 * min(int(rows), prod(x.shape[:-1])) * weight.shape[0] * DTYPE_BYTES[x.dtype]


PIECE = 1 << 18  # logits whose exponentials are formed at once
ROWS = 4096  # rows of a product that are widened at once


def _scratch(segment: Segment, call: Call, backward: bool) -> int:
    """What an operator forms beside its results: wide copies of narrow values, pieces of logits, sums over the squares
    of a mask."""
    named = {n: segment.types[v] for n, v in zip(call.row.operands, call.operands, strict=True)}
    first = next(iter(named.values()))
    wide = DTYPE_BYTES[statistics_dtype(first.dtype)]
    narrow = DTYPE_BYTES[first.dtype] < wide
    if call.operator in ("rms_norm", "layer_norm"):
        if backward:
            return first.elements * (3 * wide - DTYPE_BYTES[first.dtype] if narrow else wide)
        return 2 * first.elements * wide if narrow else 0
    if call.operator.startswith("attention") and ("window" in dict(call.attributes) or "starts" in named):
        return wide * (first.elements + sum(t.elements for n, t in named.items() if backward and n in ("k", "v", "kv")))
    if call.operator == "vocab_sum":
        return min(first.elements, PIECE) * wide * (2 if narrow else 1)
    return _logits(segment, call)


def _weight_scratch(segment: Segment, call: Call) -> int:
    """What forming weight gradients takes beside their float32 sums: wide copies of narrow rows, or with many rows the
    product itself on devices that form it in float32."""
    if call.row.weight_with_input or not call.row.parameters:
        return 0
    named = {n: segment.types[v] for n, v in zip(call.row.operands, call.operands, strict=True)}
    weight, result = named[call.row.parameters[0]], segment.types[call.results[0]]
    wide = DTYPE_BYTES[statistics_dtype(weight.dtype)]
    if DTYPE_BYTES[weight.dtype] == wide:
        return 0
    if call.operator != "linear":
        return wide * result.elements
    rows = prod(result.shape[:-1])
    widened = min(rows, ROWS) * sum(weight.shape)
    return wide * (max(widened, weight.elements) if rows >= ROWS else widened)


def _backward_workspace(segment: Segment, retained: set[str], weights: bool) -> int:
    """The same for the gradients of body values, from the last call to the first."""
    live, peak = 0, 0
    inside: dict[str, int] = {}
    outside = {*segment.inputs, *segment.outputs, *segment.parameters}
    for call in reversed(segment.body):
        for value in call.operands:
            if value in segment.differentiable and value not in outside and value not in inside:
                if "d." + value in retained:
                    continue
                inside[value] = segment.types[value].bytes
                live += inside[value]
        peak = max(peak, live + max(_scratch(segment, call, True), _weight_scratch(segment, call) if weights else 0))
        for value in call.results:
            live -= inside.pop(value, 0)
    return peak


def segment_workspace(segment: Segment, opcode: str, pieces: tuple[str, ...] = (), tier: str = "") -> int:
    """Bytes that one instruction needs beside its registers; `pieces`: those of the frame that a forward keeps."""
    if opcode == "forward":
        kept = (value for piece in pieces for value in segment.pieces[piece])
        return _forward_workspace(segment, segment.body, {*segment.outputs, *kept})
    if opcode == "recompute":
        found, stored = segment.rebuild(tier), segment.stored(tier)
        made = (value for piece, values in segment.pieces.items() if piece not in stored for value in values)
        body = segment.rebuild_body(tier)
        return _forward_workspace(segment, body, {*(found.writes if found else ()), *made})
    if opcode == "backward_weight":
        return max((_weight_scratch(segment, call) for call in segment.body), default=0)
    retained = set(segment.weight_frame) if opcode == "backward_input" else set()
    return _backward_workspace(segment, retained, opcode == "backward")
