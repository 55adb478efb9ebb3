"""Rules about the sequence and the ranks that share it."""

from __future__ import annotations

from titan.compiler.spec.breach import Breach, Choices
from titan.compiler.spec.divisors import around, divisors, multiples
from titan.compiler.spec.schema import Spec


def context(spec: Spec, s: Choices) -> Breach | None:
    sequence = spec.train.sequence
    if sequence % s.context == 0:
        return None
    facts = ((f"sequence = {sequence}", "train.sequence"),)
    message = f"context = {s.context} does not divide sequence = {sequence}"
    return Breach(message, "context", around(divisors(sequence), s.context), facts)


def sequence_parallel(spec: Spec, s: Choices) -> Breach | None:
    sequence, parts = spec.train.sequence, s.context * s.tensor
    if not s.sequence_parallel or sequence % parts == 0:
        return None
    facts = ((f"sequence = {sequence}", "train.sequence"),)
    message = f"sequence = {sequence} is not a multiple of context {s.context} x tensor {s.tensor} = {parts}"
    near = (*(f"sequence = {m}" for m in multiples(sequence, parts)), "sequence_parallel = false")
    return Breach(f"{message}, as sequence_parallel needs", "sequence_parallel", near, facts)


def head_exchange(spec: Spec, s: Choices) -> Breach | None:
    attention, parts = spec.model.attention, s.context * s.tensor
    if attention is None or s.context_form != "heads" or s.context == 1:
        return None
    if attention.heads % parts == 0 and attention.kv_heads % parts == 0:
        return None
    ok = tuple(
        c
        for c in divisors(spec.train.sequence)
        if attention.heads % (c * s.tensor) == 0 and attention.kv_heads % (c * s.tensor) == 0
    )
    near = tuple(f"context = {c}" for c in around(ok, s.context))
    facts = (
        (f"heads = {attention.heads}, kv_heads = {attention.kv_heads}", "model.attention.kv_heads"),
        ("a ring, or gathering keys and values, has no limit by heads", "parallel.context_form"),
    )
    message = (
        f"head exchange over context {s.context} x tensor {s.tensor} = {parts} ranks needs {parts} to divide both"
        f" {attention.heads} heads and {attention.kv_heads} kv_heads"
    )
    return Breach(message, "context_form", (*near, "context_form = ring", "context_form = gathered"), facts)


def ring_heads(spec: Spec, s: Choices) -> Breach | None:
    """Mixed form: the ranks of a ring's place divide the context and exchange whole heads."""
    attention, heads, parts = spec.model.attention, s.context_heads, s.context_heads * s.tensor
    if s.context_form != "ring" or heads == 1 or attention is None:
        return None
    ok = tuple(
        h
        for h in divisors(s.context)
        if attention.heads % (h * s.tensor) == 0 and attention.kv_heads % (h * s.tensor) == 0
    )
    if heads in ok:
        return None
    facts = (
        (f"heads = {attention.heads}, kv_heads = {attention.kv_heads}", "model.attention.kv_heads"),
        ("a ring alone (context_heads = 1) has no limit by heads", "parallel.context_heads"),
    )
    message = f"context_heads = {heads} does not divide context = {s.context}"
    if s.context % heads == 0:
        message = (
            f"head exchange over context_heads {heads} x tensor {s.tensor} = {parts} ranks needs {parts} to divide both"
            f" {attention.heads} heads and {attention.kv_heads} kv_heads"
        )
    near = tuple(f"context_heads = {h}" for h in around(ok or (1,), heads))
    return Breach(message, "context_heads", near, facts)


def zigzag(spec: Spec, s: Choices) -> Breach | None:
    """Every rank of a ring holds two chunks of the sequence."""
    sequence, ring = spec.train.sequence, s.context // max(s.context_heads, 1)
    if s.context_form != "ring" or s.context_order != "zigzag" or ring < 2 or sequence % (2 * ring) == 0:
        return None
    message = f"sequence = {sequence} is not a multiple of 2 x {ring}, the chunks of a ring of {ring} in zigzag order"
    near = (*(f"sequence = {m}" for m in multiples(sequence, 2 * ring)), "context_order = contiguous")
    facts = (("rank r holds the chunks r and 2n - 1 - r, so that all have equal work", "parallel.context_form"),)
    return Breach(message, "train.sequence", near, facts)


def latent_ring(spec: Spec, s: Choices) -> Breach | None:
    attention = spec.model.attention
    if attention is None or attention.kind != "mla" or s.context_form != "ring" or s.context == 1:
        return None
    message = "latent attention has no ring: its keys and values are gathered, or its heads exchanged"
    return Breach(message, "context_form", ("context_form = heads", "context_form = gathered"))
