"""A decoder in numbers: what closed forms read of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from titan.compiler.plan.frozen import dataclass


@dataclass(frozen=True, slots=True)
class Mixture:
    """One kind of layer: how many there are, inner width that every token meets (of the feed-forward layer, or of
    shared experts), and the experts, 0 without."""

    count: int
    ffn: int
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0


class Widths(NamedTuple):
    """Numbers per token of attention on a rank: of its heads' queries, keys and values together, and what they mix; of
    latents and places, which heads have in common; whether products of heads read the layer's input."""

    queries: int
    keys_values: int
    mixed: int
    low: int
    place: int
    direct: bool


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder in numbers, read once from a model's plain dictionary. Per-layer figures are means over the layers."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: float
    gated: bool
    vocab: int
    tied: bool
    dtype: str
    sequence: int
    layer_parameters: float
    end_parameters: int  # embedding with positions
    weights: tuple[float, ...]  # of every layer relative to the mean one, by the matrices that a token meets
    products: tuple[tuple[int, int, bool], ...] = ()  # latent attention: (inner, outer width, sharded by heads)
    value_dim: int = 0  # with latent attention, where values are narrower than queries
    low: int = 0  # width of the latents of queries, keys and values, which no heads share
    place: int = 0  # the same of the keys' rotary part
    mixtures: tuple[Mixture, ...] = ()  # kinds of layers, where some have experts
    expert_parameters: float = 0.0  # of a mean layer
    product_dtype: str = ""  # in which products of layers are formed, where it is not the operands'
    windows: tuple[tuple[int, float], ...] = ((0, 1.0),)  # tokens that attention sees (0: all before), share of layers
    whole_parameters: int = 0  # of a layer's those that every tensor rank has: latent attention's before the heads

    def widths(self, tensor: int) -> Widths:
        """Of attention on one of so many tensor ranks; remembered by who prices layers."""
        queries = self.heads * self.head_dim // tensor
        if self.products:
            *_, (_, both, _), (mixed, _, _) = self.products
            return Widths(queries, both // tensor, mixed // tensor, self.low, self.place, self.products[0][2])
        keys = max(self.kv_heads // tensor, 1 if self.kv_heads else 0) * self.head_dim
        return Widths(queries, 2 * keys, queries, 0, 0, True)

    def layer_held(self, tensor: int) -> float:
        """Parameters of a layer, without experts, on each of so many tensor ranks."""
        return (self.layer_parameters - self.whole_parameters) / tensor + self.whole_parameters


def read_shape(model: Mapping[str, Any], sequence: int, dtype: str, product_dtype: str = "") -> Shape:
    """`model` is the plain dictionary of a spec's model, `dtype` the plan dtype of activations."""
    attention = model["attention"] or {"heads": 0, "kv_heads": 0, "head_dim": 0}
    groups, hidden = model["layers"], model["hidden"]
    layers = sum(g["count"] for g in groups)
    kinds = tuple(_kind(g["count"], g["block"]) for g in groups)
    ffn = sum(k.count * k.ffn for k in kinds) / layers
    gated = groups[0]["block"]["activation"] == "swiglu"
    number, latent = 3 if gated else 2, latent_products(attention, hidden)
    width = attention["heads"] + attention.get("kv_heads", attention["heads"])
    matrices = float(sum(k * n for k, n, _ in latent)) if latent else 2.0 * hidden * width * attention["head_dim"]
    met = [matrices + number * hidden * (k.ffn + k.top_k * k.expert_ffn) for k in kinds]
    mean = sum(k.count * m for k, m in zip(kinds, met, strict=True)) / layers
    windows: dict[int, float] = {}
    for group in groups:
        window = group["block"].get("window") or sequence
        reach = window if window < sequence else 0
        windows[reach] = windows.get(reach, 0.0) + group["count"] / layers
    held = sum(k.count * 3 * hidden * k.experts * k.expert_ffn for k in kinds) / layers
    return Shape(
        hidden, layers, attention["heads"], attention.get("kv_heads", attention["heads"]),
        attention["head_dim"] + attention.get("rope_dim", 0), ffn, gated, model["vocab"],
        model["tied"], dtype, sequence,
        matrices + number * hidden * ffn,
        (model["vocab"] + (model["max_positions"] if model["positions"] == "learned" else 0)) * hidden,
        tuple(m / mean for k, m in zip(kinds, met, strict=True) for _ in range(k.count)),
        latent, attention.get("value_dim", 0),
        (attention["query_rank"] or 0) + attention["kv_rank"] if latent else 0, attention.get("rope_dim", 0),
        kinds if held else (), held, product_dtype,
        tuple(windows.items()), sum(k * n for k, n, by_heads in latent if not by_heads),
    )  # fmt: skip


def _kind(count: int, block: Mapping[str, Any]) -> Mixture:
    if "experts" not in block:
        return Mixture(count, block["ffn"])
    return Mixture(count, block["shared"] * block["ffn"], block["experts"], block["top_k"], block["ffn"])


def latent_products(attention: Mapping[str, Any], hidden: int) -> tuple[tuple[int, int, bool], ...]:
    """(inner, outer width, sharded by heads) of the products of latent attention; nothing for another kind."""
    if "kv_rank" not in attention:
        return ()
    heads, rank, keys = attention["heads"], attention["query_rank"], attention["kv_rank"]
    width = heads * (attention["head_dim"] + attention["rope_dim"])
    queries = ((hidden, rank, False), (rank, width, True)) if rank else ((hidden, width, True),)
    both = heads * (attention["head_dim"] + attention["value_dim"])
    down = ((hidden, keys, False), (hidden, attention["rope_dim"], False))
    return (*queries, *down, (keys, both, True), (heads * attention["value_dim"], hidden, True))
