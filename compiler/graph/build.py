"""Spec -> ModelGraph: a decoder as parts with global shapes and named dims, before any parallelism."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any

from titan.compiler.graph.model_graph import ModelGraph, Op, Part, Value
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.mesh import Mesh
from titan.compiler.plan.operators import Attribute, statistics_dtype
from titan.compiler.strategy import Strategy

if TYPE_CHECKING:
    from titan.compiler.spec.schema import Dense, Mla, Model, Moe, Spec

COMPUTE_DTYPE = {"fp32": "f32", "bf16": "bf16", "fp64": "f64", "fp8": "bf16"}  # of tensors; fp8: of products
SEQUENCE = ("batch", "sequence")


@dataclass
class _Builder:
    """Collects values and operators of one part; every method returns the name of its result."""

    model: Model
    dtype: str
    batch: int
    sequence: int
    vocab: int
    narrow: str = ""  # dtype in which products of layers are formed, where it is not that of their operands
    packed: bool = False  # several documents share a sequence
    pieces: int = 1  # of a sequence, between ranks: experts' slots are whole on each
    tokens: int = 0  # of a sequence, without what fills it up
    values: dict[str, Value] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)

    def value(self, name: str, dim: str, size: int, kind: str = "activation") -> str:
        self.values[name] = Value(name, self.dtype, (*SEQUENCE, dim), (self.batch, self.sequence, size), kind)
        return name

    def data(self, name: str, dtype: str, scalar: bool = False) -> str:
        shape: tuple[int, ...] = () if scalar else (self.batch, self.sequence)
        self.values[name] = Value(name, dtype, () if scalar else SEQUENCE, shape, "data")
        return name

    def parameter(self, name: str, dims: tuple[str, ...], shape: tuple[int, ...]) -> str:
        self.values[name] = Value(name, self.dtype, dims, shape, "parameter")
        return name

    def experts(self, name: str, dim: str, size: int, experts: int, slots: int) -> str:
        """A tensor with one slice per expert."""
        shape = (experts, self.batch, slots, size)
        self.values[name] = Value(name, self.dtype, ("experts", *SEQUENCE, dim), shape)
        return name

    def op(
        self, operator: str, result: str, operands: tuple[str, ...], dim: str, size: int, **attributes: Attribute
    ) -> str:
        results = (self.value(result, dim, size), *(f"{result}.{a}" for a in _auxiliary(operator)))
        for name in results[1:]:
            dims, shape = SEQUENCE, (self.batch, self.sequence)
            if name.endswith(".lse"):
                heads = size // int(attributes.get("value_dim", attributes["head_dim"]))
                dims, shape = ("batch", dim, "sequence"), (self.batch, heads, self.sequence)  # type: ignore[assignment]
            self.values[name] = Value(name, statistics_dtype(self.dtype), dims, shape)
        self.ops.append(Op(operator, results, operands, tuple(attributes.items())))
        return result

    def linear(self, x: str, result: str, weight: str, out: tuple[str, int], inner: tuple[str, int], bias: bool) -> str:
        self.parameter(f"{weight}.weight", (out[0], inner[0]), (out[1], inner[1]))
        given: dict[str, Any] = {"product": self.narrow} if self.narrow and weight.startswith(".") else {}
        if not bias:
            return self.op("linear", result, (x, f"{weight}.weight"), *out, **given)
        self.op("linear", f"{result}.product", (x, f"{weight}.weight"), *out, **given)
        self.parameter(f"{weight}.bias", (out[0],), (out[1],))
        return self.op("bias", result, (f"{result}.product", f"{weight}.bias"), *out)

    def norm(self, x: str, result: str, name: str, dim: tuple[str, int] | None = None) -> str:
        """Over the hidden width, or over that of `dim`."""
        dim = dim or ("hidden", self.model.hidden)
        if self.model.norm == "none":
            return x
        gain = self.parameter(f"{name}.weight", dim[:1], dim[1:])
        operands: tuple[str, ...] = (x, gain)
        if self.model.norm == "layer_norm":
            operands = (*operands, self.parameter(f"{name}.bias", dim[:1], dim[1:]))
        return self.op(self.model.norm, result, operands, *dim, eps=self.model.norm_eps)

    def dropout(self, x: str, result: str, site: str) -> str:
        if self.model.dropout == 0:
            return x
        return self.op("dropout", result, (x,), "hidden", self.model.hidden, p=self.model.dropout, site=site)

    def residual(self, x: str, branch: str, result: str) -> str:
        if not self.model.residual:
            return branch
        return self.op("add", result, (x, branch), "hidden", self.model.hidden)

    def part(self, name: str, repeated: bool, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Part:
        return Part(name, repeated, inputs, outputs, tuple(self.values.values()), tuple(self.ops))


def _auxiliary(operator: str) -> tuple[str, ...]:
    from titan.compiler.plan.operators import OPERATORS

    return OPERATORS[operator].auxiliary


def _rope(b: _Builder, x: str, result: str, dim: tuple[str, int]) -> str:
    model = b.model
    assert model.attention is not None
    if model.positions != "rope" or model.rope is None:
        return x
    attributes: dict[str, Any] = {"theta": float(model.rope.theta), "head_dim": model.attention.head_dim}
    if model.rope.scaling is not None:
        scaling = model.rope.scaling
        attributes |= {
            "factor": float(scaling.factor),
            "low": float(scaling.low_frequency_factor),
            "high": float(scaling.high_frequency_factor),
            "original": int(scaling.original_max_positions),
        }
    return b.op("rope", result, (x,), *dim, **attributes)


def _attention(b: _Builder, x: str, window: int | None) -> str:
    attention, hidden = b.model.attention, ("hidden", b.model.hidden)
    if attention is None:
        return x
    if attention.kind == "mla":
        return _latent_attention(b, x, attention)
    size = attention.head_dim
    heads, kv_heads = ("heads", attention.heads * size), ("kv_heads", attention.kv_heads * size)
    normed = b.norm(x, "attn_in", ".attn_norm")
    q = b.linear(normed, "q", ".attn.q", heads, hidden, attention.bias)
    k = b.linear(normed, "k", ".attn.k", kv_heads, hidden, attention.bias)
    v = b.linear(normed, "v", ".attn.v", kv_heads, hidden, attention.bias)
    if attention.qk_norm:
        q, k = _head_norm(b, q, "q.norm", heads, size), _head_norm(b, k, "k.norm", kv_heads, size)
    q, k = _rope(b, q, "q.rope", heads), _rope(b, k, "k.rope", kv_heads)
    operator, operands = "attention", tuple[str, ...]((q, k, v))
    if b.packed:
        operator, operands = "attention_documents", (*operands, b.data("starts", "i64"))
    narrow: dict[str, Any] = {"window": window} if window is not None and window < b.tokens else {}
    mixed = b.op(operator, "mixed", operands, *heads, head_dim=size, causal=True, **narrow)
    out = b.linear(mixed, "attn_out", ".attn.out", hidden, heads, attention.out_bias)
    return b.residual(x, b.dropout(out, "attn_drop", "attention"), "h")


def _head_norm(b: _Builder, x: str, result: str, dim: tuple[str, int], size: int) -> str:
    gain = b.parameter(f".attn.{result[0]}_norm.weight", ("head_dim",), (size,))
    return b.op("head_norm", result, (x, gain), *dim, head_dim=size, eps=b.model.norm_eps)


def _latent_attention(b: _Builder, x: str, a: Mla) -> str:
    """Queries, keys and values through latents; only the projections from the latents are sharded by heads. The rotary
    parts are turned inside the attention operator."""
    hidden, heads = ("hidden", b.model.hidden), ("heads", a.heads * a.width)
    normed, latent = b.norm(x, "attn_in", ".attn_norm"), ("kv_rank", a.kv_rank)
    if a.query_rank is None:
        q = b.linear(normed, "q", ".attn.q", heads, hidden, False)
    else:
        rank = ("query_rank", a.query_rank)
        low = b.linear(normed, "q_low", ".attn.q_down", rank, hidden, False)
        q = b.linear(b.norm(low, "q_latent", ".attn.q_norm", rank), "q", ".attn.q_up", heads, rank, False)
    low = b.linear(normed, "kv_low", ".attn.kv_down", latent, hidden, False)
    place = b.linear(normed, "place", ".attn.place", ("rope", a.rope_dim), hidden, False)
    both = ("kv_heads", a.heads * (a.head_dim + a.value_dim))
    kv = b.linear(b.norm(low, "kv_latent", ".attn.kv_norm", latent), "kv", ".attn.kv_up", both, latent, False)
    out = ("heads", a.heads * a.value_dim)
    theta = float(b.model.rope.theta) if b.model.rope else 0.0
    mixed = b.op(
        "latent_attention", "mixed", (q, kv, place), *out, head_dim=a.width, value_dim=a.value_dim, causal=True,
        theta=theta,
    )  # fmt: skip
    return b.residual(x, b.linear(mixed, "attn_out", ".attn.out", hidden, out, False), "h")


def _mixture(b: _Builder, x: str, block: Moe, inner: str) -> str:
    """Router, exchange of tokens, experts, and back; shared experts beside them. `inner` names the dim of an expert's
    width: `ffn` where tensor ranks share it."""
    hidden, experts = ("hidden", b.model.hidden), block.experts
    normed = b.norm(x, "ffn_in", ".ffn_norm")
    logits = b.linear(normed, "router", ".ffn.router", ("router", experts), hidden, False)
    weights = b.op("route", "weights", (logits,), "top_k", block.top_k, top_k=block.top_k)
    slots = b.pieces * -(-b.sequence // b.pieces * block.top_k // experts)
    chosen = (("experts", experts), ("top_k", block.top_k))

    def product(source: str, result: str, out: tuple[str, int], width: tuple[str, int]) -> str:
        name = f".ffn.experts.{result}.weight"
        b.parameter(name, ("experts", out[0], width[0]), (experts, out[1], width[1]))
        given = (("product", b.narrow),) if b.narrow else ()
        b.ops.append(Op("expert_linear", (b.experts(result, *out, experts, slots),), (source, name), given))
        return result

    sent = b.experts("sent", *hidden, experts, slots)
    b.ops.append(Op("dispatch", (sent,), (normed, weights), chosen))
    gate, up = product(sent, "gate", (inner, block.ffn), hidden), product(sent, "up", (inner, block.ffn), hidden)
    turned = b.experts("turned", inner, block.ffn, experts, slots)
    b.ops.append(Op("expert_swiglu", (turned,), (gate, up)))
    parts = product(turned, "down", hidden, (inner, block.ffn))
    out = b.op("combine", "mixture", (parts, weights), *hidden)
    if block.shared:
        out = b.op("add", "both", (out, _shared(b, normed, block)), *hidden)
    return b.residual(x, out, "y")


def _shared(b: _Builder, normed: str, block: Moe) -> str:
    hidden, ffn = ("hidden", b.model.hidden), ("ffn", block.shared * block.ffn)
    gate = b.linear(normed, "shared_gate", ".ffn.shared.gate", ffn, hidden, False)
    up = b.linear(normed, "shared_up", ".ffn.shared.up", ffn, hidden, False)
    return b.linear(b.op("swiglu", "shared_in", (gate, up), *ffn), "shared", ".ffn.shared.down", hidden, ffn, False)


def _ffn(b: _Builder, x: str, block: Dense) -> str:
    hidden, ffn = ("hidden", b.model.hidden), ("ffn", block.ffn)
    normed = b.norm(x, "ffn_in", ".ffn_norm")
    if block.activation == "swiglu":
        gate = b.linear(normed, "gate", ".ffn.gate", ffn, hidden, block.bias)
        up = b.linear(normed, "up", ".ffn.up", ffn, hidden, block.bias)
        inner = b.op("swiglu", "inner", (gate, up), *ffn)
    else:
        up = b.linear(normed, "up", ".ffn.up", ffn, hidden, block.bias)
        if block.activation == "relu":
            inner = b.op("relu", "inner", (up,), *ffn)
        else:
            inner = b.op(
                "gelu", "inner", (up,), *ffn, approximate="tanh" if block.activation == "gelu_tanh" else "none"
            )
    out = b.linear(inner, "ffn_out", ".ffn.down", hidden, ffn, block.bias)
    return b.residual(x, b.dropout(out, "ffn_drop", "ffn"), "y")


def _embed(b: _Builder) -> Part:
    model = b.model
    b.data("tokens", "i64")
    b.parameter("embed.weight", ("vocab", "hidden"), (b.vocab, model.hidden))
    x = b.op("embedding", "embedded", ("tokens", "embed.weight"), "hidden", model.hidden)
    if model.positions == "learned":
        b.parameter("positions.weight", ("position", "hidden"), (model.max_positions, model.hidden))
        operator, operands = "add_positions", tuple[str, ...]((x, "positions.weight"))
        if b.packed:
            operator, operands = "add_positions_documents", (*operands, b.data("position_starts", "i64"))
        x = b.op(operator, "placed", operands, "hidden", model.hidden)
    x = b.dropout(x, "embedded.drop", "embedding")
    return b.part("embed", False, ("tokens", *(v for v in ("position_starts",) if v in b.values)), (x,))


def _layer(b: _Builder, block: Dense | Moe, name: str, inner: str) -> Part:
    b.value("x", "hidden", b.model.hidden)
    between = _attention(b, "x", block.window)
    out = _mixture(b, between, block, inner) if block.kind == "moe" else _ffn(b, between, block)
    return b.part(name, True, ("x", *(v for v in ("starts",) if v in b.values)), (out,))


def _head(b: _Builder, rows: int) -> Part:
    """`rows`: tokens whose logits are formed at once and not kept; 0: all, kept until backward."""
    model, statistic = b.model, statistics_dtype(b.dtype)
    b.value("x", "hidden", model.hidden)
    b.data("labels", "i64")
    b.data("count", statistic, scalar=True)
    normed = b.norm("x", "head_in", "final_norm")
    weight = "embed.weight" if model.tied else "head.weight"
    b.parameter(weight, ("vocab", "hidden"), (b.vocab, model.hidden))
    for name in ("peak", "total", "target"):
        b.values[name] = Value(name, statistic, SEQUENCE, (b.batch, b.sequence))
    b.values["loss"] = Value("loss", statistic, (), ())
    given: tuple[tuple[str, Attribute], ...] = (("vocab", model.vocab),)
    operands, kind = tuple[str, ...]((normed, weight)), "linear_vocab"
    if rows:
        given = (*given, ("rows", rows))
    else:
        operands, kind = (b.op("linear", "logits", operands, "vocab", b.vocab),), "vocab"
    b.ops.append(Op(f"{kind}_max", ("peak",), operands, given))
    b.ops.append(Op(f"{kind}_sum", ("total", "target"), (*operands, "labels", "peak"), given))
    b.ops.append(Op("token_loss", ("loss",), ("peak", "total", "target", "labels", "count"), (("kind", model.loss),)))
    return b.part("head", False, ("x", "labels", "count"), ("loss",))


def build(spec: Spec, strategy: Strategy, mesh: Mesh) -> ModelGraph:
    """The graph of one micro-batch over all data ranks: micro_batch * data sequences, vocabulary, both padded."""
    from titan.compiler.spec.padding import padded
    from titan.compiler.spec.vocabulary import padded_vocab

    model, dtype = spec.model, COMPUTE_DTYPE[spec.train.precision]
    vocab = padded_vocab(model.vocab, strategy.tensor)

    def builder() -> _Builder:
        pieces = strategy.context * (strategy.tensor if strategy.sequence_parallel else 1)
        narrow = "f8" if spec.train.precision == "fp8" else ""
        batch, packed = strategy.micro_batch * strategy.data, spec.train.separator is not None
        sequence = padded(spec.train.sequence, strategy)
        return _Builder(model, dtype, batch, sequence, vocab, narrow, packed, pieces, spec.train.sequence)

    inner = "expert_ffn" if strategy.expert_tensor == 1 else "ffn"
    kinds: dict[Dense | Moe, int] = {}
    chain: list[tuple[int, int | None]] = [(0, None)]
    layer = 0
    for group in model.layers:
        index = kinds.setdefault(group.block, len(kinds) + 1)
        chain.extend((index, layer + offset) for offset in range(group.count))
        layer += group.count
    layers = tuple(
        _layer(builder(), block, "s" if index == 1 else f"k{index}s", inner) for block, index in kinds.items()
    )
    parts = (_embed(builder()), *layers, _head(builder(), strategy.loss_rows))
    chain.append((len(parts) - 1, None))
    return ModelGraph(mesh, parts, tuple(chain))
