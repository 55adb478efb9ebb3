"""Vocabulary padding: enough, no more than needed, and equal parts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from titan.compiler.spec.vocabulary import padded_vocab


def test_known_paddings() -> None:
    assert padded_vocab(50257, 1) == 50304  # the padding that is usual for GPT-2
    assert padded_vocab(50257, 2) == 50432
    assert padded_vocab(128256, 8) == 129024
    assert padded_vocab(1024, 2) == 1024 and padded_vocab(251, 4) == 252


@given(st.integers(1, 300_000), st.integers(1, 64))
def test_padding_is_the_least_that_splits_evenly(vocab: int, tensor: int) -> None:
    padded = padded_vocab(vocab, tensor)
    assert padded >= vocab and padded % tensor == 0
    multiple = 128 * tensor if vocab >= 1024 * tensor else tensor
    assert padded - vocab < multiple and padded % multiple == 0
    assert padded_vocab(padded, tensor) == padded
