"""Attention over a block of keys, with the log-sum-exp of the scores: blocks of one query are merged exactly.

All tensors are [batch, heads, length, head_dim]; keys and values may have fewer heads (grouped queries). `lse` is
[batch, heads, queries] in float32 (float64 for float64). The backward of a block takes output and log-sum-exp of the
*whole* attention: softmax probabilities are exp(score - lse) whatever the block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from titan.runtime.dtypes import statistics
from torch import Tensor

_aten = torch.ops.aten
Block = tuple[Tensor, Tensor]
Forward = Callable[[Tensor, Tensor, Tensor, bool], Block]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]]


def attention_block(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Block:
    """(out, lse). `causal` needs as many keys as queries: query i sees keys 0..i."""
    return _kernel(q)[0](q, k, v, causal)


def attention_block_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's part of the gradients of q, k and v; `out` and `lse` are those of the merged attention."""
    return _kernel(q)[1](gradient, q, k, v, out, lse, causal)


def merge(first: Block, second: Block) -> Block:
    """Attention over the union of two disjoint blocks of keys: the second is merged into the first, in place."""
    (out, lse), (other, other_lse) = first, second
    total = torch.logaddexp(lse, other_lse)
    out.mul_((lse - total).exp().unsqueeze(-1))
    out.addcmul_(other.to(out.dtype), (other_lse - total).exp().unsqueeze(-1))
    lse.copy_(total)
    return first


def _kernel(q: Tensor) -> tuple[Forward, Backward]:
    """The fused kernel for this device and dtype, or plain matrix products where there is none. Kernels of CUDA load 16
    bytes at once; that of 16 bits ends at heads of 256."""
    width = q.shape[-1]
    if q.device.type == "cpu":
        return _cpu, _cpu_backward
    if q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16) and width % 8 == 0 and width <= 256:
        return _flash, _flash_backward
    if q.device.type == "cuda" and q.dtype == torch.float32 and width % 4 == 0:
        return _efficient, _efficient_backward
    return plain_block, plain_block_backward


def _cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Block:
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, lse


def _cpu_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Any:
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(g, q, k, v, out, lse, 0.0, causal)


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Block:
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)
    return out, lse


def _flash_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Any:
    seed, unused = (torch.zeros(2, dtype=torch.uint64, device=q.device) for _ in range(2))  # no dropout: never read
    return _aten._scaled_dot_product_flash_attention_backward(
        g, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, unused
    )


def _efficient(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Block:
    k, v = _for_each_query(q, k), _for_each_query(q, v)
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
    return out, lse[..., : q.shape[2]]


def _efficient_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Any:
    # the kernel reads rows of 32; where there is no query its forward writes infinity: no weight on any key
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
    offset = torch.zeros((), dtype=torch.int64, device=q.device)
    wide_k, wide_v = _for_each_query(q, k), _for_each_query(q, v)
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        g, q, wide_k, wide_v, None, out, lse, offset, offset, 0.0, [True, True, True, False], causal
    )
    return dq, _summed(dk, k), _summed(dv, v)


def _for_each_query(q: Tensor, shared: Tensor) -> Tensor:
    """Keys or values repeated for the query heads that share them."""
    repeats = q.shape[1] // shared.shape[1]
    return shared if repeats == 1 else shared.repeat_interleave(repeats, 1)


def _summed(wide: Tensor, shared: Tensor) -> Tensor:
    """Transpose of `_for_each_query`."""
    if wide.shape[1] == shared.shape[1]:
        return wide
    batch, heads, length, width = shared.shape
    return wide.reshape(batch, heads, -1, length, width).sum(2)


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    scores = torch.mul(q @ k.transpose(-1, -2), q.shape[-1] ** -0.5)
    if causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1), -torch.inf)
    return scores


def plain_block(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Block:
    """The same with plain matrix products; needs memory for all scores."""
    exact = statistics(q.dtype)
    scores = _scores(q.to(exact), _for_each_query(q, k).to(exact), causal)
    lse = scores.logsumexp(-1)
    out = scores.sub_(lse.unsqueeze(-1)).exp_() @ _for_each_query(q, v).to(exact)
    return out.to(q.dtype), lse


def plain_block_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of `plain_block`."""
    exact = statistics(q.dtype)
    g, wide_q = gradient.to(exact), q.to(exact)
    wide_k, wide_v = (_for_each_query(q, t).to(exact) for t in (k, v))
    weights = _scores(wide_q, wide_k, causal).sub_(lse.unsqueeze(-1)).exp_()
    inner = (g * out.to(exact)).sum(-1, keepdim=True)
    ds = (g @ wide_v.transpose(-1, -2)).sub_(inner).mul_(weights).mul_(q.shape[-1] ** -0.5)
    dk, dv = ds.transpose(-1, -2) @ wide_q, weights.transpose(-1, -2) @ g
    return (ds @ wide_k).to(q.dtype), _summed(dk, k).to(k.dtype), _summed(dv, v).to(v.dtype)
