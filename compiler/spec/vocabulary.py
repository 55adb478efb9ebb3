"""Vocabulary padding: how many rows the embedding and the head have under tensor parallelism."""

from __future__ import annotations

ROWS_PER_RANK = 128  # a multiple of this keeps matrix kernels on their fast path
TINY = 8  # below this many such blocks per rank padding to whole blocks would distort a model


def padded_vocab(vocab: int, tensor: int) -> int:
    """Rows after padding: the next multiple of 128 x tensor; of tensor alone for a tiny vocabulary.

    The rows from `vocab` on are masked out of the softmax and never leave in an export.
    """
    block = ROWS_PER_RANK * tensor
    multiple = block if vocab >= TINY * block else tensor
    return -(-vocab // multiple) * multiple
