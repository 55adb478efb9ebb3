"""The benchmark's model, for both sides: a GPT of 8 layers, 256 wide, 4 heads, 6.6 million parameters, 128 tokens.

Titan gets it as a spec, torch as modules, cut into stages of the same layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from titan.compiler.spec.resolve import resolve
from titan.compiler.spec.schema import Spec
from titan.grammar.parser import parse
from torch import Tensor, nn

LAYERS, HIDDEN, HEADS, VOCAB, SEQUENCE, MICRO_BATCH = 8, 256, 4, 512, 128, 2

SPEC = """import clusters.local
model = model {{
    vocab = {vocab}, hidden = {hidden}, max_positions = {sequence}, norm = layer_norm, positions = learned
    layers = {layers} * dense {{ ffn = {ffn}, activation = gelu, bias = true }}
    attention = gqa {{ heads = {heads}, kv_heads = {heads}, head_dim = {head_dim}, bias = true, out_bias = true }}
    tied = false, init_std = 0.02
}}
cluster = local.cpu with {{ devices_per_node = 2 }}
train {{
    sequence = {sequence}, global_batch = {batch}, precision = fp32, steps = 1000
    optimizer = adamw {{ learning_rate = 0.001 }}, data = synthetic({vocab})
}}
"""


def spec(micro_batches: int) -> Spec:
    text = SPEC.format(
        vocab=VOCAB, hidden=HIDDEN, sequence=SEQUENCE, layers=LAYERS, ffn=4 * HIDDEN, heads=HEADS,
        head_dim=HIDDEN // HEADS, batch=MICRO_BATCH * micro_batches,
    )  # fmt: skip
    return resolve(parse(text, "pipelines.titan"), Path())


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn_norm, self.ffn_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        y = self.attn_norm(x)
        q, k, v = (w(y).view(batch, length, HEADS, -1).transpose(1, 2) for w in (self.q, self.k, self.v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(batch, length, HIDDEN))
        return x + self.down(F.gelu(self.up(self.ffn_norm(x))))


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(SEQUENCE, HIDDEN)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.tokens(tokens) + self.positions.weight
        return found


def stage(index: int, layers: Sequence[int]) -> nn.Sequential:
    """Stage `index` of a model cut into so many layers each."""
    torch.manual_seed(index)
    parts: list[nn.Module] = [Embedding()] if index == 0 else []
    parts += [Layer() for _ in range(layers[index])]
    if index == len(layers) - 1:
        parts += [nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)]
    return nn.Sequential(*parts)


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(micro_batches: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    size = (MICRO_BATCH * micro_batches, SEQUENCE)
    tokens, labels = (torch.randint(0, VOCAB, size, generator=generator) for _ in "xy")
    return tokens, labels
