"""Python's search for cyclic garbage, kept away from work that makes none.

Plans are values without cycles, and most of what compiling makes lives to its end. The search looks through all of it
again and again as it grows, which costs a large plan a quarter of its time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

OBJECTS = 1 << 20  # made between two searches of the young ones


@contextmanager
def rare_collections() -> Iterator[None]:
    """Within it cyclic garbage is looked for rarely; also a decorator."""
    before = gc.get_threshold()
    gc.set_threshold(max(OBJECTS, before[0]) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
