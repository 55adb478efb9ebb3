"""What one run of a segment's body costs: FLOPs, and the storages that it makes."""

from __future__ import annotations

from titan.compiler.plan.inside import Inside, backward_inside, forward_inside, gradient_bytes, weight_inside
from titan.compiler.plan.operators import Flops
from titan.compiler.plan.segment import Segment


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


def segment_inside(
    segment: Segment, opcode: str, pieces: tuple[str, ...] = (), tier: str = "", carried: tuple[str, ...] = ()
) -> Inside:
    """What one instruction holds; `pieces`: those of the frame that a forward keeps, `carried`: inputs of a backward to
    whose gradients others' are added."""
    if opcode == "forward":
        kept = (value for piece in pieces for value in segment.pieces[piece])
        return forward_inside(segment, segment.body, frozenset((*segment.outputs, *kept)))
    if opcode == "recompute":
        found, stored = segment.rebuild(tier), segment.stored(tier)
        made = (value for piece, values in segment.pieces.items() if piece not in stored for value in values)
        return forward_inside(segment, segment.rebuild_body(tier), frozenset((*(found.writes if found else ()), *made)))
    if opcode == "backward_weight":
        return weight_inside(segment)
    return backward_inside(segment, opcode == "backward", frozenset(carried))


def weight_frame_bytes(segment: Segment) -> int:
    """Bytes of the storages that a weight frame keeps alive: a view keeps the whole of what it is a view of."""
    found = segment_inside(segment, "backward_input")
    return sum(
        found.sizes[root] if isinstance(root, int) else gradient_bytes(segment, root)
        for root in dict.fromkeys(found.frame)
        if root != ""
    )
