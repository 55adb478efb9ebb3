"""A small model of any number of layers for tests of whole plans."""

from __future__ import annotations

from pathlib import Path

from titan.compiler.spec.resolve import resolve
from titan.compiler.spec.schema import Spec
from titan.grammar.parser import parse

TEXT = """import clusters.local
model = model {{
    vocab = 32, hidden = 16, layers = {layers} * dense {{ ffn = 24 }}, max_positions = 8
    attention = gqa {{ heads = 2, kv_heads = 2, head_dim = 8 }}, norm = rms_norm
    positions = rope, rope = {{ theta = 10000 }}, tied = {tied}, dropout = {dropout}, init_std = 0.3
}}
cluster = local.cpu with {{ devices_per_node = {devices} }}
train {{
    sequence = 8, global_batch = {batch}, precision = {precision}, steps = 4, clip = 0.2, warmup_steps = 1
    optimizer = adamw {{ learning_rate = 0.01, weight_decay = 0.1 }}, data = synthetic(32)
}}
parallel {{ {parallel} }}
"""


def small_spec(
    layers: int, batch: int, devices: int, precision: str = "fp64", tied: bool = False, parallel: str = "",
    dropout: float = 0.0,
) -> Spec:  # fmt: skip
    """A decoder 16 wide on eight tokens."""
    text = TEXT.format(
        layers=layers, batch=batch, devices=devices, precision=precision, tied=str(tied).lower(), parallel=parallel,
        dropout=dropout,
    )  # fmt: skip
    return resolve(parse(text, "small.titan"), Path())
