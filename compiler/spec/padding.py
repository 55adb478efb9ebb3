"""Sequences that their ranks cannot share out evenly are filled up with places that count for nothing.

The places stand at the end, where a causal mask keeps them from every token; their labels are ignored. So loss, token
counts, positions and gradients are those of the sequence without them; only work and memory grow, and are priced.
"""

from __future__ import annotations

from math import lcm

from titan.compiler.spec.breach import Choices


def sequence_unit(s: Choices) -> int:
    """What a sequence must be a multiple of: one piece for each context rank, of which tensor ranks take a part each
    under sequence parallelism, and two chunks for each rank of a ring in zigzag order."""
    ring = s.context // max(s.context_heads, 1) if s.context_form == "ring" else 1
    chunks = 2 * ring if ring > 1 and s.context_order == "zigzag" else 1
    return lcm(chunks, s.context * (s.tensor if s.sequence_parallel else 1))


def padded(sequence: int, s: Choices) -> int:
    """The sequence filled up to the next multiple."""
    unit = sequence_unit(s)
    return -(-sequence // unit) * unit


def unit_in_words(s: Choices) -> str:
    """`32 = context 4 x tensor 8`."""
    unit, pieces = sequence_unit(s), s.context * (s.tensor if s.sequence_parallel else 1)
    shared = f"context {s.context}" + (f" x tensor {s.tensor}" if s.sequence_parallel and s.tensor > 1 else "")
    if unit == pieces:
        return f"{unit} = {shared}" if " x " in shared else f"{shared}"
    return f"{unit} ({shared}; two chunks for each rank of a ring in zigzag order)"


def padding_in_words(sequence: int, s: Choices) -> str:
    """What is filled up, to which multiple, and what that costs; empty where nothing is."""
    more = padded(sequence, s) - sequence
    if not more:
        return ""
    return (
        f"sequence = {sequence} is filled up to {sequence + more}, a multiple of {unit_in_words(s)}:"
        f" {more} masked place{'s' if more > 1 else ''}, {100 * more / sequence:.2g}% more"
    )
