"""Measured curves: seconds of a kind of work by its size, as a cluster's `curves` give them.

A curve is named after what it prices: an operator and its phase (`linear_forward`, `rms_norm_backward_bf16`), an opcode
(`optimizer_step`), or a collective and the members of its group (`all_gather_2`). Its size is

    products of matrices      FLOP, each dim d counted as d + half (`matmul_half_dim`): small dims fill tiles badly
    attention                 pairs of query and key times the width of the heads
    other operators           bytes of operands and results; of other instructions the bytes that they move
    collectives, transfers    bytes of the whole tensor that is gathered, summed, exchanged or sent

Between two points the curve is straight in the logarithms of both; before the first it keeps the first seconds (a
launch takes what it takes), after the last the last rate.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from math import exp, log, prod
from typing import Any

from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.mask import band_pairs
from titan.compiler.plan.operators import TensorType
from titan.compiler.plan.segment import Call
from titan.compiler.plan.sequence import mean_pairs

PRODUCTS = ("linear", "expert_linear", "linear_vocab_max", "linear_vocab_sum")


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds at rising sizes."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, size: float) -> float:
        sizes, seconds = self.sizes, self.seconds
        if size <= sizes[0]:
            return seconds[0]
        if size >= sizes[-1]:
            return seconds[-1] * size / sizes[-1]
        k = bisect_left(sizes, size)
        share = log(size / sizes[k - 1]) / log(sizes[k] / sizes[k - 1])
        return seconds[k - 1] * exp(share * log(seconds[k] / seconds[k - 1]))


def read_curves(cluster: Mapping[str, Any]) -> dict[str, Curve]:
    """The curves of a cluster's plain dictionary."""
    found = cluster.get("curves") or {}
    return {name: Curve(tuple(c["sizes"]), tuple(c["seconds"])) for name, c in found.items()}


def curve_name(operator: str, phase: str, dtype: str) -> str:
    """float32 is the plain name."""
    return f"{operator}_{phase}" + ("" if dtype == "f32" else f"_{dtype}")


def operator_size(call: Call, operands: tuple[TensorType, ...], results: tuple[TensorType, ...], half: float) -> float:
    """Size of a call, the same for all its phases."""
    if call.operator in PRODUCTS:
        weight = operands[1]
        n, k = weight.shape[-2:]
        experts = prod(weight.shape[:-2])
        return product_size(operands[0].elements // (k * experts), n, k, half) * experts
    if call.operator.startswith("attention"):
        given, (batch, queries, width) = dict(call.attributes), operands[0].shape
        keys = operands[1].shape[-2]
        if "ring" in given:
            return batch * width * mean_pairs(given, keys)
        return attention_size(batch, queries, keys, width, bool(given.get("causal", True)), int(given.get("window", 0)))
    return float(sum(t.bytes for t in operands) + sum(t.bytes for t in results))


def product_size(m: int, n: int, k: int, half: float) -> float:
    return 2.0 * (m + half) * (n + half) * (k + half)


def attention_size(batch: int, queries: int, keys: int, width: int, causal: bool, window: int = 0) -> float:
    """Causal queries that are fewer than the keys are the last ones: without a window they see all keys but half a
    square."""
    pairs = band_pairs((keys - queries, queries), (0, keys), window) if causal else queries * keys
    return float(batch * width * pairs)
