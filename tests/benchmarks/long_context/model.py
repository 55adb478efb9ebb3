"""The model of the benchmark in its forms, and what the formulas say about it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from titan.compiler.lower import lower
from titan.compiler.plan.program import Plan
from titan.compiler.spec.resolve import resolve
from titan.compiler.spec.schema import Spec
from titan.compiler.strategy import Strategy
from titan.grammar.parser import parse

HEADS, WIDTH, LAYERS, VOCAB, SIZE = 2, 64, 2, 512, 4  # SIZE: bytes of an element
THETA, EPSILON = 500000.0, 1e-5  # of the rotary positions, of the norms
ROWS = 512  # tokens whose logits are formed at once


@dataclass(frozen=True, slots=True)
class Form:
    """`heads`: ranks that exchange heads inside a ring's place."""

    context: int
    kind: str = "ring"
    heads: int = 1

    @property
    def ring(self) -> int:
        return self.context // self.heads if self.kind == "ring" else 1

    @property
    def exchange(self) -> int:
        return self.context if self.kind == "heads" else self.heads


FORMS = {
    "one": Form(1, "gathered"),
    "ring2": Form(2),
    "heads2": Form(2, "heads"),
    "gathered2": Form(2, "gathered"),
    "ring4": Form(4),
    "mixed4": Form(4, heads=2),
    "gathered4": Form(4, "gathered"),
}


def spec(tokens: int, cluster: str, precision: str = "fp32") -> Spec:
    """`cluster`: overrides of a machine of one rank, as the language writes them."""
    text = f"""
import clusters.local
model = model {{
    vocab = {VOCAB}, hidden = {HEADS * WIDTH}, layers = {LAYERS} * dense {{ ffn = 256 }}, max_positions = {tokens}
    attention = gqa {{ heads = {HEADS}, kv_heads = {HEADS}, head_dim = {WIDTH} }}, rope = {{ theta = {THETA} }}
    norm_eps = {EPSILON}
}}
cluster = local.cpu with {{ {cluster} }}
train {{ sequence = {tokens}, global_batch = 1, precision = {precision}, steps = 3, data = synthetic({VOCAB}) }}
"""
    return resolve(parse(text, "long_context.titan"), Path())


def plan(tokens: int, form: Form, cluster: str = "", precision: str = "fp32") -> Plan:
    """On `cluster`; on a node for every rank where none is given."""
    strategy = Strategy(
        context=form.context, context_form=form.kind, context_heads=form.heads, stages=(LAYERS,), loss_rows=ROWS
    )
    return lower(spec(tokens, cluster or f"nodes = {form.context}", precision), strategy)


def wire_bytes(tokens: int, form: Form) -> int:
    """Bytes that a rank sends in a step so that all queries meet all keys, without gradients of parameters.

    Keys and values, S h_kv elements each: around a ring (n-1)/n of them forward, again backward with their gradients;
    gathered (n-1)/n forward and their gradients scattered backward. An exchange of heads over u ranks moves (u-1)/u of
    a rank's queries, keys, values and results forward, and of their gradients backward.
    """
    keys = 2 * tokens * HEADS * WIDTH * SIZE  # of the whole sequence
    moved = 0
    if form.ring > 1:
        moved += 3 * keys // form.exchange * (form.ring - 1) // form.ring
    if form.exchange > 1:
        moved += 2 * 2 * keys // form.context * (form.exchange - 1) // form.exchange
    if form.kind == "gathered":
        moved += 2 * keys * (form.context - 1) // form.context
    return LAYERS * moved


def attention_flops(tokens: int, ranks: int) -> float:
    """FLOPs of a rank's causal attention in a step: two products forward, five backward, over half of all pairs."""
    return LAYERS * 7 * 2.0 * HEADS * WIDTH * tokens**2 / 2 / ranks
