"""Small real plans of every kind of layout: made by the lowering from a tiny model."""

from __future__ import annotations

from functools import cache

from titan.compiler.lower import lower
from titan.compiler.plan.program import Plan
from titan.compiler.spec.schema import (
    Attention,
    Cluster,
    Dense,
    Device,
    LayerGroup,
    Link,
    Model,
    Rope,
    Spec,
    Train,
)
from titan.compiler.strategy import Strategy


def model(family: str, layers: int, kv_heads: int, vocab: int, tied: bool) -> Model:
    """A tiny model; vocabulary 13 is odd, so it is padded."""
    llama = family == "llama"
    return Model(
        vocab=vocab,
        hidden=8,
        attention=Attention(heads=4, kv_heads=kv_heads, head_dim=2, bias=not llama, out_bias=not llama),
        layers=(
            LayerGroup(count=layers, block=Dense(ffn=8, activation="swiglu" if llama else "gelu_tanh", bias=not llama)),
        ),
        norm="rms_norm" if llama else "layer_norm",
        positions="rope" if llama else "learned",
        rope=Rope(theta=100.0) if llama else None,
        max_positions=8,
        tied=tied,
        init_std=0.3,
    )


def spec(found: Model, world: int, global_batch: int, precision: str = "fp64") -> Spec:
    link = Link(bandwidth=1e9, latency=1e-5)
    cluster = Cluster(
        devices_per_node=world, device=Device(memory=1 << 30, memory_bandwidth=1e10), intra=link, inter=link,
        host_memory=world << 30, host_link=link,
    )  # fmt: skip
    return Spec(found, cluster, Train(sequence=8, global_batch=global_batch, precision=precision, steps=3))  # type: ignore[arg-type]


# name -> (family, layers per stage, kv heads, vocabulary, tied, precision, fields of the strategy)
KINDS: dict[str, tuple[str, tuple[int, ...], int, int, bool, str, dict[str, object]]] = {
    "one": ("llama", (2,), 4, 16, False, "fp64", {}),
    "data": ("llama", (2,), 4, 16, False, "fp64", {"data": 2}),
    "zero": ("gpt2", (1,), 4, 13, True, "fp64", {"data": 2, "zero": 1}),
    "tensor": ("llama", (2,), 4, 13, False, "fp64", {"tensor": 2}),
    "sequence": ("gpt2", (2,), 4, 13, True, "fp64", {"tensor": 2, "sequence_parallel": True}),
    "kv": ("llama", (1,), 2, 16, False, "fp64", {"tensor": 4, "sequence_parallel": True}),
    "pipeline": ("llama", (2, 1), 4, 16, False, "fp64", {"pipeline": 2}),
    "tied": ("gpt2", (1, 1, 1), 4, 13, True, "fp64", {"pipeline": 3, "recompute": "full"}),
    "ring": ("llama", (1,), 4, 16, False, "fp64", {"context": 2}),
    "heads": ("llama", (1,), 4, 16, True, "fp64", {"context": 2, "context_form": "heads", "zero": 1}),
    "half": ("llama", (1, 1), 4, 16, False, "bf16", {"pipeline": 2, "data": 2, "zero": 1}),
    "all": (
        "gpt2",
        (1, 2),
        4,
        13,
        True,
        "fp64",
        {
            "pipeline": 2,
            "data": 2,
            "context": 2,
            "tensor": 2,
            "sequence_parallel": True,
            "zero": 1,
            "recompute": "full",
        },
    ),
    "square": ("llama", (1, 1), 4, 13, False, "fp64", {"pipeline": 2, "data": 2, "zero": 1}),
    "split": ("gpt2", (1, 1), 4, 13, True, "fp64", {"pipeline": 2, "schedule": "zero_bubble_h1", "micro_batches": 4}),
    "chunks": (
        "llama",
        (1, 1, 1, 1),
        4,
        16,
        False,
        "fp64",
        {"pipeline": 2, "schedule": "interleaved", "micro_batches": 4},
    ),
    "pairs": ("gpt2", (1, 1), 4, 13, True, "fp64", {"pipeline": 2, "schedule": "dualpipe", "micro_batches": 4}),
    "away": ("gpt2", (1, 1), 4, 13, True, "fp64", {"pipeline": 2, "data": 2, "zero": 1, "offload": "both"}),
    "gpipe": ("llama", (1, 1), 4, 16, True, "fp64", {"pipeline": 2, "tensor": 2, "data": 2, "schedule": "gpipe"}),
}


def strategy(name: str, micro_batches: int = 3) -> Strategy:
    _, stages, _, _, _, _, fields = KINDS[name]
    return Strategy(**{"stages": stages, "micro_batches": micro_batches, **fields})  # type: ignore[arg-type]


@cache
def plan(name: str, micro_batches: int = 3) -> Plan:
    """The plan of one kind."""
    family, stages, kv_heads, vocab, tied, precision, _ = KINDS[name]
    chosen = strategy(name, micro_batches)
    found = model(family, sum(stages), kv_heads, vocab, tied)
    batch = chosen.data * chosen.micro_batch * chosen.micro_batches
    return lower(spec(found, chosen.world_size, batch, precision), chosen)
