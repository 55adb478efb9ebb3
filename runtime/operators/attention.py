"""Scaled dot-product attention with grouped queries, by fused kernels that keep the log-sum-exp.

With `causal`, the queries stand at positions start .. start + s of the keys: the earlier keys are one block seen by all
queries, the next s keys a triangular block; keys beyond are never read. With a `window` every query sees only so many
keys, its own the last.
"""

from __future__ import annotations

from titan.compiler.plan.mask import squares
from titan.runtime.attention_blocks import attention_block, attention_block_backward, merge
from titan.runtime.attention_squares import Seen, attention_of, everywhere, gradients_of
from titan.runtime.place import Attributes, Gradients, Place, Saved
from torch import Tensor


def forward(attributes: Attributes, place: Place, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """q [batch, s, heads * d]; k, v [batch, t, kv_heads * d] -> (out as q, lse [batch, heads, s])."""
    width, causal = int(attributes["head_dim"]), bool(attributes.get("causal", True))
    start, length = int(attributes.get("start", 0)), q.shape[1]
    if "window" in attributes:
        out, lse = attention_of(attributes, (q, k, v), _windowed(attributes, q, k))
        return out.to(q.dtype), lse
    qs, ks, vs = (_heads(x, width) for x in (q, k, v))
    if not causal:
        out, lse = attention_block(qs, ks, vs, False)
    else:
        out, lse = attention_block(qs, ks.narrow(2, start, length), vs.narrow(2, start, length), True)
        if start:
            before = attention_block(qs, ks.narrow(2, 0, start), vs.narrow(2, 0, start), False)
            out, lse = merge(before, (out, lse))
    return _joined(out), lse


def backward_input(attributes: Attributes, place: Place, saved: Saved, gradients: Gradients) -> tuple[Tensor, ...]:
    if "window" in attributes:
        seen = _windowed(attributes, saved["q"], saved["k"])
        return tuple(d.to(saved["q"].dtype) for d in gradients_of(attributes, saved, gradients[0], seen))
    width, causal = int(attributes["head_dim"]), bool(attributes.get("causal", True))
    names = (saved["q"], saved["k"], saved["v"], saved["out"], gradients[0])
    q, k, v, out, dy = (_heads(x, width) for x in names)
    start = int(attributes.get("start", 0))
    if causal and (start or k.shape[2] > q.shape[2]):
        return _offset_backward(dy, q, k, v, out, saved["lse"], start)
    return tuple(_joined(d) for d in attention_block_backward(dy, q, k, v, out, saved["lse"], causal))


def backward_weight(
    attributes: Attributes, place: Place, saved: Saved, gradients: Gradients, into: tuple[Tensor, ...]
) -> None:
    return None


def _windowed(attributes: Attributes, q: Tensor, k: Tensor) -> Seen:
    queries, keys = (int(attributes.get("start", 0)), q.shape[1]), (0, k.shape[1])
    return everywhere(squares(queries, keys, int(attributes["window"])))


def _offset_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, start: int
) -> tuple[Tensor, ...]:
    """Both blocks with the merged log-sum-exp; keys that were not read get zero."""
    length = q.shape[2]
    batch, kv_heads, keys, width = k.shape
    dk, dv = (k.new_zeros(batch, keys, kv_heads, width).transpose(1, 2) for _ in range(2))
    near = [x.narrow(2, start, length) for x in (k, v, dk, dv)]
    dq, part_k, part_v = attention_block_backward(dy, q, near[0], near[1], out, lse, True)
    near[2].copy_(part_k)
    near[3].copy_(part_v)
    if start:
        before = [x.narrow(2, 0, start) for x in (k, v, dk, dv)]
        part_q, part_k, part_v = attention_block_backward(dy, q, before[0], before[1], out, lse, False)
        before[2].copy_(part_k)
        before[3].copy_(part_v)
        dq = dq + part_q
    return _joined(dq), _joined(dk), _joined(dv)


def _heads(x: Tensor, width: int) -> Tensor:
    """[batch, length, heads * d] -> [batch, heads, length, d], without a copy."""
    return x.view(x.shape[0], x.shape[1], -1, width).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    """Transpose of `_heads`; a copy only where the kernel laid its result out differently."""
    return x.transpose(1, 2).flatten(2).contiguous()
