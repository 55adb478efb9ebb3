"""Shapes and FLOPs of operators that are planned before they are run: experts, latent attention, formed scores."""

from __future__ import annotations

from collections.abc import Mapping

from titan.compiler.plan.tensor import DTYPE_BYTES, Attribute, Flops, Shape, TensorType, statistics_dtype


def scores_type(attributes: Mapping[str, Attribute], ins: tuple[TensorType, ...]) -> tuple[tuple[str, Shape], ...]:
    """Scores are formed as tensors: probabilities before and after dropout in the queries' dtype, and its mask."""
    batch, sequence, width = ins[0].shape
    heads, size = width // int(attributes["head_dim"]), DTYPE_BYTES[ins[0].dtype]
    return ((ins[0].dtype, ins[0].shape), ("u8", (2 * size + 1, batch, heads, sequence, ins[1].shape[1])))


def scores_flops(attributes: Mapping[str, Attribute], ins: tuple[TensorType, ...]) -> Flops:
    """Two matrix products forward, four backward, over all scores: nothing is left out under the mask."""
    batch, sequence, width = ins[0].shape
    product = 2.0 * batch * sequence * ins[1].shape[1] * width
    return Flops(2 * product, 4 * product)


def latent_type(attributes: Mapping[str, Attribute], ins: tuple[TensorType, ...]) -> tuple[tuple[str, Shape], ...]:
    batch, sequence, width = ins[0].shape
    heads = width // int(attributes["head_dim"])
    out = (batch, sequence, heads * int(attributes["value_dim"]))
    return ((ins[0].dtype, out), (statistics_dtype(ins[0].dtype), (batch, heads, sequence)))


def latent_flops(attributes: Mapping[str, Attribute], ins: tuple[TensorType, ...]) -> Flops:
    """As for attention, with values narrower than queries: backward forms the scores again, and two gradients each."""
    batch, sequence, width = ins[0].shape
    wide = 2.0 * batch * sequence * ins[1].shape[1] * width * (0.5 if attributes.get("causal", True) else 1.0)
    narrow = wide * int(attributes["value_dim"]) / int(attributes["head_dim"])
    return Flops(wide + narrow, 3 * wide + 2 * narrow)


def route_type(attributes: Mapping[str, Attribute], ins: tuple[TensorType, ...]) -> tuple[tuple[str, Shape], ...]:
    return ((ins[0].dtype, (*ins[0].shape[:2], int(attributes["top_k"]))),)


def dispatch_type(attributes: Mapping[str, Attribute], ins: tuple[TensorType, ...]) -> tuple[tuple[str, Shape], ...]:
    """Slots of every expert: as many tokens as it receives when all are used alike, rounded up."""
    batch, sequence, width = ins[0].shape
    experts = int(attributes["experts"])
    return ((ins[0].dtype, (experts, batch, -(-sequence * int(attributes["top_k"]) // experts), width)),)


def expert_type(attributes: Mapping[str, Attribute], ins: tuple[TensorType, ...]) -> tuple[tuple[str, Shape], ...]:
    return ((ins[0].dtype, (*ins[0].shape[:-1], ins[1].shape[1])),)


def expert_flops(attributes: Mapping[str, Attribute], ins: tuple[TensorType, ...]) -> Flops:
    work = 2.0 * ins[0].elements * ins[1].shape[1]
    return Flops(work, work, work)


def combine_type(attributes: Mapping[str, Attribute], ins: tuple[TensorType, ...]) -> tuple[tuple[str, Shape], ...]:
    return ((ins[0].dtype, (*ins[1].shape[:2], ins[0].shape[-1])),)
