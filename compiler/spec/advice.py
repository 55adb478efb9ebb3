"""What is legal and slow: layouts and shapes that the hardware does not like, said as warnings and never changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from titan.compiler.spec.schema import Spec
from titan.grammar.diagnostics import Diagnostic

ALIGNED, BEST = 8, 64  # dims of products in 16 bits and less: what units need, and what they are built for


def advice(spec: Spec, pins: dict[str, Any]) -> tuple[Diagnostic, ...]:
    """Warnings about fixed choices and about the model's shape."""
    found = [crossing(spec, pins["tensor"])] if "tensor" in pins else []
    return (*(d for d in found if d is not None), *_misaligned(spec, pins.get("tensor", 1)))


def crossing(spec: Spec, tensor: int) -> Diagnostic | None:
    """Tensor ranks exchange activations in every layer: beyond a node that goes over its slower links."""
    inside = spec.cluster.devices_per_node
    if tensor <= inside or spec.cluster.nodes == 1:
        return None
    ratio = spec.cluster.intra.bandwidth / spec.cluster.inter.bandwidth
    message = (
        f"tensor = {tensor} (tp) crosses nodes of {inside} devices: every layer's activations travel over links that"
        f" are {ratio:.3g} times slower than those inside a node"
    )
    near = (f"tensor = {inside}",) if inside > 1 else ("tensor = 1",)
    return Diagnostic("T320", message, spec.span("parallel.tensor"), severity="warning", nearest=near)


def _misaligned(spec: Spec, tensor: int) -> Iterator[Diagnostic]:
    """Dims that waste the units of products in 16 bits; nothing on devices without such units."""
    if spec.train.precision not in ("bf16", "fp8") or spec.train.precision not in spec.cluster.device.peak:
        return
    attention = spec.model.attention
    dims = {} if attention is None else {"head_dim": (attention.head_dim, "model.attention")}
    dims["hidden"] = (spec.model.hidden, "model.hidden")
    for group in spec.model.layers:
        if group.block.ffn % tensor == 0:
            share = "ffn" if tensor == 1 else f"ffn / tensor {tensor}"
            dims[share] = (group.block.ffn // tensor, "model.layers")
    for name, (size, path) in dims.items():
        if size % ALIGNED:
            message = (
                f"{name} = {size} is not a multiple of {ALIGNED}: its products run at a part of the device's rate"
                f" (multiples of {BEST} are best); the model is trained as it is written"
            )
            near = tuple(f"{name} = {d}" for d in (size // BEST * BEST, -(-size // BEST) * BEST) if d)
            yield Diagnostic("T321", message, spec.span(path), severity="warning", nearest=near)
