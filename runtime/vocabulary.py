"""Columns of a vocabulary-parallel matrix that are words, not padding; and tokens whose logits are formed at once."""

from __future__ import annotations

from titan.runtime.place import Attributes


def true_columns(attributes: Attributes, columns: int) -> int:
    """How many of this rank's `columns`, the first of which is word `start`, lie below `vocab`."""
    if "vocab" not in attributes:
        return columns
    return max(0, min(columns, int(attributes["vocab"]) - int(attributes.get("start", 0))))


def rows_at_once(attributes: Attributes, rows: int) -> tuple[slice, ...]:
    """All rows, `rows` of the attributes at a time."""
    step = int(attributes["rows"])
    return tuple(slice(first, min(first + step, rows)) for first in range(0, rows, step))
