"""The model part of a spec: attention, blocks, positions, and exact parameter counts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field as Rule
from pydantic import model_validator
from titan.compiler.spec.divisors import around, divisors
from titan.compiler.spec.kinds import (
    NONE_WORD,
    Count,
    Flag,
    Part,
    Positive,
    Problem,
    Share,
    quantity,
    refuse,
    whole,
)

MAX_LAYERS = 2**16


class Attention(Part):
    """Causal self-attention with grouped keys and values; `bias` is on q, k, v, `out_bias` on the output projection."""

    KINDS = ("gqa",)
    kind: Literal["gqa"] = "gqa"
    heads: Count
    kv_heads: Count
    head_dim: Count
    bias: Flag = False
    out_bias: Flag = False
    window: Annotated[Count | None, NONE_WORD] = None

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        """Without `kv_heads` every head has its own keys and values."""
        if isinstance(data, dict) and "kv_heads" not in data and "heads" in data:
            data = data | {"kv_heads": data["heads"]}
        return data

    @model_validator(mode="after")
    def _grouped(self) -> Attention:
        if self.heads % self.kv_heads:
            legal = around(divisors(self.heads), self.kv_heads)
            text = f"heads = {self.heads} is not a multiple of kv_heads = {self.kv_heads}"
            raise refuse("T232", text, legal, at="kv_heads")
        if self.window is not None:
            raise refuse("T224", "attention windows are not available in this version; leave `window` out", at="window")
        return self


class RopeScaling(Part):
    """Llama-3 scaling: frequencies whose wavelength is over `original_max_positions / low_frequency_factor` are divided
    by `factor`, those under `original_max_positions / high_frequency_factor` stay, between them it is interpolated."""

    KINDS = ("llama3",)
    factor: Positive
    low_frequency_factor: Positive
    high_frequency_factor: Positive
    original_max_positions: Count


class Rope(Part):
    """Rotary positions with base `theta`."""

    KINDS = ("rope",)
    theta: Positive
    scaling: Annotated[RopeScaling | None, NONE_WORD] = None


class Dense(Part):
    """A decoder block with one feed-forward layer of inner width `ffn` (per matrix)."""

    KINDS = ("dense",)
    kind: Literal["dense"] = "dense"
    ffn: Count
    activation: Literal["swiglu", "gelu", "gelu_tanh", "relu"] = "swiglu"
    bias: Flag = False

    def matrices(self) -> int:
        """Weight matrices of the feed-forward layer: gate, up, down or up, down."""
        return 3 if self.activation == "swiglu" else 2


class LayerGroup(Part):
    """`count` equal blocks after one another."""

    count: Annotated[int, Rule(gt=0, le=MAX_LAYERS), quantity("")]
    block: Dense


class Model(Part):
    """A decoder-only language model.

    `attention = none` leaves the feed-forward layers alone and `loss = linear` the softmax out: test models whose
    arithmetic is exact.
    """

    KINDS = ("model",)
    name: str = "model"
    vocab: Count
    hidden: Count
    attention: Annotated[Attention | None, NONE_WORD]
    layers: Annotated[tuple[LayerGroup, ...], Rule(min_length=1)]
    norm: Literal["rms_norm", "layer_norm", "none"] = "rms_norm"
    norm_eps: Positive = 1e-5
    positions: Literal["rope", "learned", "none"] = "rope"
    rope: Annotated[Rope | None, NONE_WORD] = None
    max_positions: Count
    tied: Flag = False
    dropout: Share = 0.0
    init_std: Positive = 0.02
    initializer: Literal["normal", "power_of_two"] = "normal"
    residual: Flag = True
    loss: Literal["cross_entropy", "linear"] = "cross_entropy"

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        """A lone block is one layer; without `head_dim` heads share the hidden width."""
        if not isinstance(data, dict):
            return data
        if isinstance(data.get("layers"), dict):
            data = data | {"layers": [{"count": 1, "block": data["layers"]}]}
        attention = data.get("attention")
        if isinstance(attention, dict) and "head_dim" not in attention:
            width = _head_dim(whole(data.get("hidden")), whole(attention.get("heads")))
            data = data | {"attention": attention | ({} if width is None else {"head_dim": width})}
        return data

    @model_validator(mode="after")
    def _layered(self) -> Model:
        if self.layer_count > MAX_LAYERS:
            raise refuse("T236", f"{self.layer_count} layers are more than {MAX_LAYERS}", at="layers")
        return self

    @model_validator(mode="after")
    def _positioned(self) -> Model:
        if self.positions == "rope" and self.rope is None:
            raise refuse("T233", "positions = rope needs `rope = { theta = ... }`", at="positions")
        if self.positions != "rope" and self.rope is not None:
            raise refuse("T233", f"`rope` is given, but positions = {self.positions} would ignore it", at="rope")
        if self.positions == "rope" and self.attention is None:
            raise refuse(
                "T233", "rotary positions turn queries and keys, and attention = none has none", at="positions"
            )
        if self.positions == "rope" and self.attention is not None and self.attention.head_dim % 2:
            text = f"rotary positions turn pairs of numbers, so head_dim = {self.attention.head_dim} must be even"
            raise refuse("T232", text, at="attention.head_dim")
        return self

    @property
    def layer_count(self) -> int:
        return sum(group.count for group in self.layers)

    @property
    def blocks(self) -> tuple[Dense, ...]:
        """The block of every layer in order."""
        return tuple(group.block for group in self.layers for _ in range(group.count))

    def parameter_count(self) -> int:
        """Parameters without any padding; a tied head counts once."""
        return (
            self.embedding_count()
            + sum(group.count * self.layer_parameter_count(group.block) for group in self.layers)
            + self._norm_count()
            + self.head_count()
        )

    def embedding_count(self) -> int:
        """Token embedding and learned positions."""
        return (self.vocab + (self.max_positions if self.positions == "learned" else 0)) * self.hidden

    def head_count(self) -> int:
        """What the output head adds to the embedding."""
        return 0 if self.tied else self.vocab * self.hidden

    def layer_parameter_count(self, block: Dense) -> int:
        """Attention, feed-forward and two norms of one layer."""
        matrices = block.matrices()
        ffn = matrices * self.hidden * block.ffn + ((matrices - 1) * block.ffn + self.hidden if block.bias else 0)
        norms = (1 if self.attention is None else 2) * self._norm_count()
        return self._attention_count() + ffn + norms

    def _attention_count(self) -> int:
        a = self.attention
        if a is None:
            return 0
        queries, shared = a.heads * a.head_dim, a.kv_heads * a.head_dim
        biases = (queries + 2 * shared if a.bias else 0) + (self.hidden if a.out_bias else 0)
        return self.hidden * (2 * queries + 2 * shared) + biases

    def _norm_count(self) -> int:
        return {"rms_norm": 1, "layer_norm": 2, "none": 0}[self.norm] * self.hidden


def _head_dim(hidden: int | None, heads: int | None) -> int | Problem | None:
    if hidden is None or heads is None:
        return None
    if hidden % heads:
        text = f"hidden = {hidden} is not a multiple of heads = {heads}, so head_dim must be written"
        near = tuple(f"heads = {h}" for h in around(divisors(hidden), heads))
        return Problem("T232", text, near, at="^heads")
    return hidden // heads
