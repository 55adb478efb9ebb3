"""The spec: every block and key that a `.titan` file may have, with units, ranges and defaults. All values are immutable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, model_validator
from pydantic import Field as Rule

from titan.compiler.spec.kinds import (
    LATER,
    NONE_WORD,
    Bandwidth,
    Bytes,
    Count,
    Flag,
    Length,
    Natural,
    NonNegative,
    Part,
    Positive,
    Price,
    Rate,
    Reserve,
    Seconds,
    Share,
    quantity,
    refuse,
    shown,
    wrong_kind,
)
from titan.compiler.spec.origin import DEFAULT, Origin
from titan.compiler.spec.values import Applied, Scalar
from titan.compiler.spec.wishes import Parallel, Wish
from titan.grammar.diagnostics import Diagnostic, Span

__all__ = [
    "AdamW",
    "Attention",
    "Cluster",
    "Dense",
    "Device",
    "Efficiency",
    "LayerGroup",
    "Link",
    "Model",
    "Objective",
    "Parallel",
    "Rope",
    "RopeScaling",
    "Spec",
    "Train",
    "Validation",
    "Wish",
]


class Attention(Part):
    """Causal self-attention with grouped keys and values; `bias` is on q, k and v, `out_bias` on the output projection."""

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
            legal = tuple(str(k) for k in _divisors_around(self.heads, self.kv_heads))
            text = f"heads = {self.heads} is not a multiple of kv_heads = {self.kv_heads}: every key/value head serves equally many heads"
            raise refuse("T232", text, legal, at="kv_heads")
        if self.window is not None:
            raise refuse("T224", "attention windows are not available in this version; leave `window` out", at="window")
        return self


class RopeScaling(Part):
    """Llama-3 frequency scaling: wavelengths beyond `original_max_positions / low_frequency_factor` are divided by `factor`."""

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

    count: Count
    block: Dense


class Model(Part):
    """A decoder-only language model."""

    KINDS = ("model",)
    name: str = "model"
    vocab: Count
    hidden: Count
    attention: Attention
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
    head_bias: Flag = False

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
            width = _head_dim(_number(data.get("hidden")), _number(attention.get("heads")))
            data = data | {"attention": attention | ({} if width is None else {"head_dim": width})}
        return data

    @model_validator(mode="after")
    def _positioned(self) -> Model:
        if self.positions == "rope" and self.rope is None:
            raise refuse("T233", "positions = rope needs `rope = { theta = ... }`", at="positions")
        if self.positions != "rope" and self.rope is not None:
            raise refuse("T233", f"`rope` is given, but positions = {self.positions} would ignore it", at="rope")
        if self.positions == "rope" and self.attention.head_dim % 2:
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
        return (0 if self.tied else self.vocab * self.hidden) + (self.vocab if self.head_bias else 0)

    def layer_parameter_count(self, block: Dense) -> int:
        """Attention, feed-forward and two norms of one layer."""
        a = self.attention
        queries, shared = a.heads * a.head_dim, a.kv_heads * a.head_dim
        attention = self.hidden * (2 * queries + 2 * shared)
        attention += (queries + 2 * shared if a.bias else 0) + (self.hidden if a.out_bias else 0)
        matrices = block.matrices()
        ffn = matrices * self.hidden * block.ffn + ((matrices - 1) * block.ffn + self.hidden if block.bias else 0)
        return attention + ffn + 2 * self._norm_count()

    def _norm_count(self) -> int:
        return {"rms_norm": 1, "layer_norm": 2, "none": 0}[self.norm] * self.hidden


class Device(Part):
    """One accelerator: dense peak FLOP/s by dtype (empty when unmeasured) and memory bandwidth in bytes/s."""

    KINDS = ("device",)
    name: str = "device"
    memory: Bytes
    peak: dict[Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8"], Rate] = Rule(default_factory=dict)
    memory_bandwidth: Bandwidth


class Link(Part):
    """Bytes per second per device in one direction, and the latency of one message."""

    KINDS = ("link",)
    bandwidth: Bandwidth
    latency: Seconds


class Efficiency(Part):
    """A measured or assumed figure of a cluster with where it is from: `measured(0.7, "source")`."""

    KINDS = ("measured",)
    value: NonNegative
    source: str

    @model_validator(mode="before")
    @classmethod
    def _applied(cls, data: Any) -> Any:
        if not isinstance(data, Applied):
            return data
        if data.name not in cls.KINDS:
            raise wrong_kind(data.name, cls.KINDS)
        if len(data.arguments) != 2 or not hasattr(data.arguments[0], "value") or not hasattr(data.arguments[1], "value"):
            raise refuse("T214", 'a figure is written `measured(0.7, "source")`: a number and a text')
        return {"value": data.arguments[0].value, "source": data.arguments[1].value}


class Cluster(Part):
    """Equal nodes of equal devices. `memory_reserved` is what driver, context and libraries take of each device."""

    KINDS = ("cluster",)
    name: str = "cluster"
    nodes: Count = 1
    devices_per_node: Count
    device: Device
    intra: Link
    inter: Link
    price_per_device_hour: Annotated[Price | None, NONE_WORD] = None
    memory_reserved: Reserve = 0
    efficiency: dict[str, Efficiency] = Rule(default_factory=dict)

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices_per_node


class AdamW(Part):
    """AdamW with decoupled weight decay; without `min_learning_rate` a cosine ends at a tenth of the peak."""

    KINDS = ("adamw",)
    learning_rate: Positive
    min_learning_rate: Annotated[NonNegative | None, NONE_WORD] = None
    beta1: Share = 0.9
    beta2: Share = 0.95
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.1


class Validation(Part):
    """Held-out loss: every `every` steps over `batches` global batches of `data` (empty: the corpus' own held-out part)."""

    KINDS = ("validation",)
    data: Annotated[str, BeforeValidator(lambda value: _described(value))] = ""
    every: Count = 100
    batches: Count = 8


class Train(Part):
    """Training settings; `global_batch` in sequences (`4Mi tokens` is divided by `sequence`)."""

    KINDS = ("train",)
    LATER_WORDS: ClassVar[dict[str, str]] = LATER
    sequence: Length
    global_batch: Count
    precision: Literal["fp32", "bf16", "fp64"] = "fp32"
    optimizer: AdamW = AdamW(learning_rate=3e-4)
    warmup_steps: Natural = 0
    steps: Annotated[Count | None, NONE_WORD] = None
    total_tokens: Annotated[Annotated[int, Rule(gt=0), quantity("tokens", "")] | None, NONE_WORD] = None
    schedule: Literal["cosine", "constant"] = "cosine"
    clip: Annotated[Positive | None, NONE_WORD] = 1.0
    data: Annotated[str, BeforeValidator(lambda value: _described(value))] = ""
    validation: Annotated[Validation | None, NONE_WORD] = None
    seed: Natural = 1234

    @model_validator(mode="before")
    @classmethod
    def _sequences(cls, data: Any) -> Any:
        """Tokens per batch become sequences; a batch is never rounded."""
        batch = data.get("global_batch") if isinstance(data, dict) else None
        length = _number(data.get("sequence")) if isinstance(data, dict) else None
        if not isinstance(batch, Scalar) or batch.dimension != "tokens" or not length:
            return data
        whole, rest = divmod(batch.value, length)
        if rest:
            near = tuple(f"{k * length} tokens" for k in (whole, whole + 1) if k)
            text = f"global_batch = {batch.text} is no whole number of sequences of {length} tokens"
            raise refuse("T229", text, near, at="global_batch")
        return data | {"global_batch": int(whole)}

    @model_validator(mode="after")
    def _consistent(self) -> Train:
        if self.steps is not None and self.total_tokens is not None:
            raise refuse("T235", "`steps` and `total_tokens` both say how long to train; give one of them", at="total_tokens")
        end = self.total_steps
        if end is not None and self.warmup_steps > end:
            text = f"warmup_steps = {self.warmup_steps} is longer than the training of {end} steps"
            raise refuse("T235", text, (f"warmup_steps <= {end}",), at="warmup_steps")
        return self

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.sequence

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole job (total tokens rounded up to whole steps), None when not said."""
        if self.steps is not None or self.total_tokens is None:
            return self.steps
        return -(-self.total_tokens // self.tokens_per_step)


class Objective(Part):
    """What the search makes best, and the share of device memory that a plan may use."""

    goal: Literal["step_time"] = "step_time"
    direction: Literal["minimize"] = "minimize"
    memory_fraction: Annotated[float, Rule(gt=0, le=1)] = 0.92


@dataclass(frozen=True, slots=True)
class Spec:
    """A whole resolved file; `origins` says for each written path who wrote it and where."""

    model: Model
    cluster: Cluster
    train: Train
    parallel: Parallel = field(default_factory=Parallel)
    objective: Objective = field(default_factory=Objective)
    path: str = "<spec>"
    warnings: tuple[Diagnostic, ...] = ()
    origins: Mapping[str, Origin] = field(default_factory=dict, repr=False, compare=False)

    def origin(self, path: str) -> Origin:
        """Who wrote `path` ("parallel.tensor"), or the enclosing value that decided it."""
        while path:
            if path in self.origins:
                return self.origins[path]
            path = path.rpartition(".")[0]
        return DEFAULT

    def span(self, path: str) -> Span | None:
        return self.origin(path).span


def _number(value: Any) -> int | None:
    value = value.value if isinstance(value, Scalar) else value
    return int(value) if isinstance(value, int | float) and value > 0 and value == int(value) else None


def _head_dim(hidden: int | None, heads: int | None) -> int | None:
    if hidden is None or heads is None:
        return None
    if hidden % heads:
        text = f"hidden = {hidden} is not a multiple of heads = {heads}, so head_dim cannot be hidden / heads; write head_dim"
        raise refuse("T232", text, tuple(f"heads = {h}" for h in _divisors_around(hidden, heads)), at="attention.heads")
    return hidden // heads


def _divisors_around(number: int, wish: int) -> tuple[int, ...]:
    """The nearest divisors of `number` below and above `wish`."""
    below = next((d for d in range(min(wish, number), 0, -1) if number % d == 0), None)
    above = next((d for d in range(wish + 1, number + 1) if number % d == 0), None)
    return tuple(d for d in (below, above) if d is not None)


def _described(value: Any) -> Any:
    """`tokens("corpus.bin")` as the text that names it to the data loader."""
    return shown(value.arguments[0]).join((f"{value.name}(", ")")) if isinstance(value, Applied) and value.arguments else value
