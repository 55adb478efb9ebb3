"""Rules about the sequence and the ranks that share it."""

from __future__ import annotations

from titan.compiler.spec.breach import Breach, Choices
from titan.compiler.spec.divisors import around, divisors, multiples
from titan.compiler.spec.padding import sequence_unit, unit_in_words
from titan.compiler.spec.schema import Spec


def pieces(spec: Spec, s: Choices) -> Breach | None:
    """A sequence is filled up to a multiple of its pieces, unless a piece would be empty or experts be sent padding."""
    sequence, unit = spec.train.sequence, sequence_unit(s)
    if sequence % unit == 0 or not (spec.model.experts or sequence < unit):
        return None
    message = f"sequence = {sequence} is not a multiple of {unit_in_words(s)}"
    why = "a router would send the padding to experts, so mixtures are not filled up"
    if sequence < unit:
        why = "some ranks would hold nothing but padding"
    near = [f"sequence = {m}" for m in multiples(sequence, unit)]
    near += ["sequence_parallel = false"] if s.sequence_parallel and sequence % s.context == 0 else []
    near += ["context_order = contiguous"] if unit > s.context and sequence % s.context == 0 else []
    facts = ((f"sequence = {sequence}", "train.sequence"), (why, "parallel.context"))
    return Breach(message, "sequence_parallel" if s.context == 1 else "context", tuple(dict.fromkeys(near)), facts)


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


def latent_ring(spec: Spec, s: Choices) -> Breach | None:
    attention = spec.model.attention
    if attention is None or attention.kind != "mla" or s.context_form != "ring" or s.context == 1:
        return None
    message = "latent attention has no ring: its keys and values are gathered, or its heads exchanged"
    return Breach(message, "context_form", ("context_form = heads", "context_form = gathered"))
