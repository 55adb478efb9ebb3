"""Scaled dot-product attention with grouped queries, by fused kernels that keep the log-sum-exp.

With `causal`, the queries stand at positions start .. start + s of the keys: the earlier keys are one block seen by all
queries, the next s keys a triangular block; keys beyond are never read. With a `window` every query sees only so many
keys, its own the last.
"""

from __future__ import annotations

from titan.compiler.plan.mask import Square, squares
from titan.runtime.attention_squares import Seen, attention_of, everywhere, gradients_of
from titan.runtime.place import Attributes, Gradients, Place, Saved
from torch import Tensor


def forward(attributes: Attributes, place: Place, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """q [batch, s, heads * d]; k, v [batch, t, kv_heads * d] -> (out as q, lse [batch, heads, s])."""
    out, lse = attention_of(attributes, (q, k, v), _seen(attributes, q, k))
    return out.to(q.dtype), lse


def backward_input(attributes: Attributes, place: Place, saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    seen = _seen(attributes, saved["q"], saved["k"])
    return tuple(d.to(saved["q"].dtype) for d in gradients_of(attributes, saved, gradients[0], seen))


def backward_weight(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> None:
    return None


def _seen(attributes: Attributes, q: Tensor, k: Tensor) -> Seen:
    if not attributes.get("causal", True):
        return everywhere([Square(0, q.shape[1], 0, k.shape[1])])
    queries, keys = (int(attributes.get("start", 0)), q.shape[1]), (0, k.shape[1])
    return everywhere(squares(queries, keys, int(attributes.get("window", 0))))
