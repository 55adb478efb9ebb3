"""Blocks of attention: fused kernel and plain products agree, and merged blocks are the whole."""

from __future__ import annotations

import pytest
import torch
from titan.runtime.attention_blocks import (
    attention_block,
    attention_block_backward,
    merge,
    plain_block,
    plain_block_backward,
)
from torch import Tensor

torch.set_num_threads(1)


def _operands(queries: int, keys: int, heads: int, kv_heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(queries * keys)
    shapes = ((2, heads, queries, 16), (2, kv_heads, keys, 16), (2, kv_heads, keys, 16))
    return tuple(torch.randn(s, dtype=torch.float64, generator=generator).to(dtype) for s in shapes)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
@pytest.mark.parametrize(("queries", "keys", "causal"), [(40, 40, True), (7, 40, False), (600, 600, True)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_fused_and_plain_agree(
    queries: int, keys: int, causal: bool, heads: int, kv_heads: int, dtype: torch.dtype, tolerance: float
) -> None:
    q, k, v = _operands(queries, keys, heads, kv_heads, dtype)
    gradient = torch.ones_like(q) + q
    out, lse = attention_block(q, k, v, causal)
    exact = [x.double() for x in (q, k, v)]
    plain, plain_lse = plain_block(exact[0], exact[1], exact[2], causal)
    torch.testing.assert_close(out.double(), plain, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), plain_lse, rtol=tolerance, atol=tolerance)
    found = attention_block_backward(gradient, q, k, v, out, lse, causal)
    right = plain_block_backward(gradient.double(), exact[0], exact[1], exact[2], plain, plain_lse, causal)
    for a, b in zip(found, right, strict=True):
        assert a.dtype == dtype and a.shape == b.shape
        assert (a.double() - b).norm() <= tolerance * b.norm()


def test_plain_backward_equals_autograd() -> None:
    operands = [x.requires_grad_() for x in _operands(9, 9, 4, 2, torch.float64)]
    q, k, v = operands
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    q, k, v = (x.detach() for x in operands)
    out, lse = plain_block(q, k, v, True)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-12)
    for found, operand in zip(plain_block_backward(gradient, q, k, v, out, lse, True), operands, strict=True):
        torch.testing.assert_close(found, operand.grad, rtol=1e-12, atol=1e-12)


def test_blocks_in_any_number_merge_to_the_whole() -> None:
    q, k, v = _operands(10, 24, 4, 2, torch.float64)
    whole, lse = attention_block(q, k, v, False)
    gradient = torch.randn_like(whole)
    right = attention_block_backward(gradient, q, k, v, whole, lse, False)
    pieces = [(k[:, :, a:b], v[:, :, a:b]) for a, b in ((0, 5), (5, 16), (16, 24))]
    found = attention_block(q, *pieces[0], False)
    for piece in pieces[1:]:
        found = merge(found, attention_block(q, *piece, False))
    torch.testing.assert_close(found, (whole, lse), rtol=1e-12, atol=1e-12)
    parts = [attention_block_backward(gradient, q, a, b, *found, False) for a, b in pieces]
    torch.testing.assert_close(sum(p[0] for p in parts), right[0], rtol=1e-12, atol=1e-12)
    for which in (1, 2):
        torch.testing.assert_close(torch.cat([p[which] for p in parts], 2), right[which], rtol=1e-12, atol=1e-12)


def test_merge_survives_scores_of_very_different_size() -> None:
    q, k, v = _operands(4, 8, 2, 2, torch.float32)
    k = torch.cat((k[:, :, :4] * 300, k[:, :, 4:]), 2)
    whole, _ = plain_block(q.double(), k.double(), v.double(), False)
    near, far = (attention_block(q, k[:, :, part], v[:, :, part], False) for part in (slice(0, 4), slice(4, 8)))
    for first, second in ((near, far), (far, near)):
        found, _ = merge((first[0].clone(), first[1].clone()), second)
        torch.testing.assert_close(found.double(), whole, rtol=1e-4, atol=1e-4)
