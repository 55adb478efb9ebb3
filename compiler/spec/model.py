"""The model part of a spec: attention, blocks, positions, and exact parameter counts."""

# No `annotations` from `__future__`: of texts pydantic compiles each one to know the type.

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Tag, model_validator
from pydantic import Field as Rule
from titan.compiler.spec.divisors import around, divisors
from titan.compiler.spec.kinds import (
    KIND,
    NONE_WORD,
    Count,
    Flag,
    Natural,
    Part,
    Positive,
    Problem,
    Share,
    quantity,
    refuse,
    whole,
    wrong_kind,
)

MAX_LAYERS = 2**16


def _kind_of(usual: str) -> Callable[[Any], str]:
    """Which of several blocks is meant, by the name it is written with; the usual one without a name."""

    def found(value: Any) -> str:
        if isinstance(value, dict):
            return str(value.get(KIND) or value.get("kind") or usual)
        return str(getattr(value, "kind", usual))

    return found


def _one_of(*kinds: str) -> BeforeValidator:
    """Refuses a block that is written with another name than these."""

    def checked(value: Any) -> Any:
        if isinstance(value, dict) and value.get(KIND) and value[KIND] not in kinds:
            raise wrong_kind(value[KIND], kinds)
        return value

    return BeforeValidator(checked)


class Attention(Part):
    """Causal self-attention with grouped keys and values; `bias` is on q, k, v, `out_bias` on the output projection,
    `qk_norm` normalises every head of queries and keys. With a `window` a token sees so many, itself the last; blocks
    may say otherwise."""

    KINDS = ("gqa",)
    kind: Literal["gqa"] = "gqa"
    heads: Count
    kv_heads: Count
    head_dim: Count
    bias: Flag = False
    out_bias: Flag = False
    qk_norm: Flag = False
    window: Annotated[Count | None, NONE_WORD] = None

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        """Without `kv_heads` every head has its own keys and values."""
        if isinstance(data, dict) and "kv_heads" not in data and "heads" in data:
            data = data | {"kv_heads": data["heads"]}
        return data

    @model_validator(mode="after")
    def _grouped(self) -> Self:
        if self.heads % self.kv_heads:
            legal = around(divisors(self.heads), self.kv_heads)
            text = f"heads = {self.heads} is not a multiple of kv_heads = {self.kv_heads}"
            raise refuse("T232", text, legal, at="kv_heads")
        return self


class Mla(Part):
    """Multi-head latent attention: keys and values of all heads come from one latent of width `kv_rank` per token,
    queries from one of `query_rank` (none: directly). A head has `head_dim` numbers without position, `rope_dim` rotary
    ones, which its key shares with all heads, and values of `value_dim`."""

    KINDS = ("mla",)
    kind: Literal["mla"] = "mla"
    heads: Count
    kv_rank: Count
    query_rank: Annotated[Count | None, NONE_WORD] = None
    head_dim: Count
    rope_dim: Count
    value_dim: Count

    @property
    def kv_heads(self) -> int:
        return self.heads

    @property
    def width(self) -> int:
        """Of a query or key."""
        return self.head_dim + self.rope_dim


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
    """A decoder block with one feed-forward layer of inner width `ffn` (per matrix). `window`: how many tokens its
    attention sees (`none`: all before); not written, what the model's attention says."""

    KINDS = ("dense",)
    kind: Literal["dense"] = "dense"
    ffn: Count
    activation: Literal["swiglu", "gelu", "gelu_tanh", "relu"] = "swiglu"
    bias: Flag = False
    window: Annotated[Count | None, NONE_WORD] = None

    def matrices(self) -> int:
        """Weight matrices of the feed-forward layer: gate, up, down or up, down."""
        return 3 if self.activation == "swiglu" else 2


class Moe(Part):
    """A decoder block whose feed-forward layer is a mixture: every token goes through `top_k` of `experts` experts of
    inner width `ffn`, and through `shared` further ones of that width. `window` as in `dense`."""

    KINDS = ("moe",)
    kind: Literal["moe"] = "moe"
    experts: Count
    top_k: Count
    ffn: Count
    shared: Natural = 0
    activation: Literal["swiglu"] = "swiglu"
    bias: Literal[False] = False
    window: Annotated[Count | None, NONE_WORD] = None

    @model_validator(mode="after")
    def _chosen(self) -> Self:
        if self.top_k > self.experts:
            text = f"top_k = {self.top_k} is more than the {self.experts} experts"
            raise refuse("T257", text, (f"top_k <= {self.experts}",), at="top_k")
        return self

    def matrices(self) -> int:
        """Weight matrices of one expert."""
        return 3


Block = Annotated[
    Annotated[Dense, Tag("dense")] | Annotated[Moe, Tag("moe")],
    Discriminator(_kind_of("dense")),
    _one_of("dense", "moe"),
]
AnyAttention = Annotated[
    Annotated[Attention, Tag("gqa")] | Annotated[Mla, Tag("mla")],
    Discriminator(_kind_of("gqa")),
    _one_of("gqa", "mla"),
]


class LayerGroup(Part):
    """`count` equal blocks after one another."""

    count: Annotated[int, Rule(gt=0, le=MAX_LAYERS), quantity("")]
    block: Block


class Model(Part):
    """A decoder-only language model.

    `attention = none` leaves the feed-forward layers alone and `loss = linear` the softmax out: test models whose
    arithmetic is exact.
    """

    KINDS = ("model",)
    name: str = "model"
    vocab: Count
    hidden: Count
    attention: Annotated[AnyAttention | None, NONE_WORD]
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
        """A lone block is one layer; without `head_dim` heads share the hidden width; the window of the attention is
        that of all blocks that name none."""
        if not isinstance(data, dict):
            return data
        if isinstance(data.get("layers"), dict):
            data = data | {"layers": [{"count": 1, "block": data["layers"]}]}
        attention = data.get("attention")
        if isinstance(attention, dict) and "head_dim" not in attention and attention.get(KIND) != "mla":
            width = _head_dim(whole(data.get("hidden")), whole(attention.get("heads")))
            data = data | {"attention": attention | ({} if width is None else {"head_dim": width})}
        window = whole(attention.get("window")) if isinstance(attention, dict) else None
        if window is not None and isinstance(data.get("layers"), list):
            data = data | {"layers": [_with_window(group, attention["window"]) for group in data["layers"]]}
        return data

    @model_validator(mode="after")
    def _layered(self) -> Self:
        if self.layer_count > MAX_LAYERS:
            raise refuse("T236", f"{self.layer_count} layers are more than {MAX_LAYERS}", at="layers")
        return self

    @model_validator(mode="after")
    def _positioned(self) -> Self:
        if self.positions == "rope" and self.rope is None:
            raise refuse("T233", "positions = rope needs `rope = { theta = ... }`", at="positions")
        if self.positions != "rope" and self.rope is not None:
            raise refuse("T233", f"`rope` is given, but positions = {self.positions} would ignore it", at="rope")
        if self.positions == "rope" and self.attention is None:
            raise refuse(
                "T233", "rotary positions turn queries and keys, and attention = none has none", at="positions"
            )
        if self.positions == "rope" and self.attention is not None:
            key = "rope_dim" if isinstance(self.attention, Mla) else "head_dim"
            if getattr(self.attention, key) % 2:
                found = getattr(self.attention, key)
                text = f"rotary positions turn pairs of numbers, so {key} = {found} must be even"
                raise refuse("T232", text, at=f"attention.{key}")
        return self

    @model_validator(mode="after")
    def _windowed(self) -> Self:
        """Windows are of grouped-query attention."""
        if isinstance(self.attention, Attention):
            return self
        for number, group in enumerate(self.layers):
            if group.block.window is not None:
                kind = "latent attention" if self.attention else "attention = none"
                raise refuse("T224", f"{kind} has no window", ("window = none",), at=f"layers.{number}.block.window")
        return self

    @property
    def layer_count(self) -> int:
        return sum(group.count for group in self.layers)

    @property
    def blocks(self) -> tuple[Dense | Moe, ...]:
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

    def layer_parameter_count(self, block: Dense | Moe) -> int:
        """Attention, feed-forward and two norms of one layer."""
        norms = (1 if self.attention is None else 2) * self._norm_count()
        return self._attention_count() + self._ffn_count(block) + norms

    def _ffn_count(self, block: Dense | Moe) -> int:
        """One feed-forward layer, or the router and all experts."""
        one = block.matrices() * self.hidden * block.ffn
        if isinstance(block, Moe):
            return self.hidden * block.experts + (block.experts + block.shared) * one
        return one + ((block.matrices() - 1) * block.ffn + self.hidden if block.bias else 0)

    @property
    def experts(self) -> int:
        """Of the layers that have any; 0 in a dense model."""
        return max((b.block.experts for b in self.layers if isinstance(b.block, Moe)), default=0)

    def _attention_count(self) -> int:
        a = self.attention
        if a is None:
            return 0
        if isinstance(a, Mla):
            return self._latent_count(a)
        queries, shared = a.heads * a.head_dim, a.kv_heads * a.head_dim
        biases = (queries + 2 * shared if a.bias else 0) + (self.hidden if a.out_bias else 0)
        norms = 2 * a.head_dim if a.qk_norm else 0
        return self.hidden * (2 * queries + 2 * shared) + biases + norms

    def _latent_count(self, a: Mla) -> int:
        """Projections to the latents and from them, a norm on each latent, the output projection."""
        width, rank = a.heads * a.width, a.query_rank
        queries = self.hidden * width if rank is None else self.hidden * rank + rank + rank * width
        latent = self.hidden * (a.kv_rank + a.rope_dim) + a.kv_rank
        return queries + latent + a.kv_rank * a.heads * (a.head_dim + a.value_dim) + a.heads * a.value_dim * self.hidden

    def _norm_count(self) -> int:
        return {"rms_norm": 1, "layer_norm": 2, "none": 0}[self.norm] * self.hidden


def _with_window(group: Any, window: Any) -> Any:
    block = group.get("block") if isinstance(group, dict) else None
    return group | {"block": {"window": window, **block}} if isinstance(block, dict) else group


def _head_dim(hidden: int | None, heads: int | None) -> int | Problem | None:
    if hidden is None or heads is None:
        return None
    if hidden % heads:
        text = f"hidden = {hidden} is not a multiple of heads = {heads}, so head_dim must be written"
        near = tuple(f"heads = {h}" for h in around(divisors(hidden), heads))
        return Problem("T232", text, near, at="^heads")
    return hidden // heads
