"""Closed forms of what is on the host: bytes that stay on the device, and seconds that copies do not hide."""

from __future__ import annotations

from titan.compiler.cost.layer import LayerCost
from titan.compiler.cost.machine import Machine
from titan.compiler.strategy import Strategy


def nearby(s: Strategy) -> int:
    """Layers, or buckets, that are on the device at once: one in use, one that goes and those that come."""
    return 2 + s.prefetch


def kept_layers(s: Strategy, layers: float) -> float:
    """Layers, over all micro-batches under way, whose activations are on the device of `layers` that are kept."""
    if s.offload not in ("activations", "both"):
        return layers
    away = s.layers_on_host / max(sum(s.stages), 1) if s.stages else 1.0
    return layers - away * max(layers - nearby(s), 0.0)


def activation_seconds(machine: Machine, s: Strategy, layer: LayerCost, layers: float) -> float:
    """Seconds by which copies of one micro-batch are longer than the layers that they run beside."""
    if s.offload not in ("activations", "both"):
        return 0.0
    copy = layer.stored(s.recompute) / machine.host.bandwidth
    passes = (layer.forward, layer.backward + layer.rebuilt(s.recompute))
    return layers * sum(max(copy - compute, 0.0) for compute in passes)


def state_seconds(machine: Machine, s: Strategy, size: float, update: float) -> float:
    """Seconds by which `size` bytes of optimizer state on their way, both directions at once, outlast the update."""
    return max(size / machine.host.bandwidth - update, 0.0) if s.state_on_host else 0.0
