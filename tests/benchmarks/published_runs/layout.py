"""A published row as a spec and a strategy: the model, the machine and the layout that were run."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from math import gcd
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from titan.compiler.schedules.registry import SCHEDULES
from titan.compiler.spec.divisors import even_stages
from titan.compiler.spec.legality import legal
from titan.compiler.spec.schema import (
    Attention,
    Cluster,
    Dense,
    Efficiency,
    LayerGroup,
    Mla,
    Model,
    Moe,
    Objective,
    Parallel,
    Rope,
    Spec,
    Train,
    Wish,
)
from titan.compiler.strategy import Strategy

from tests.benchmarks.published_runs.rows import Row

CLUSTERS = {
    "A100-SXM-80GB": "dgx_a100",
    "A100-SXM-40GB": "dgx_a100_40gb",
    "A800-80GB": "dgx_a100",
    "H100-SXM-80GB": "dgx_h100",
    "H100-SXM-96GB-HBM2e-500W": "grand_teton",
    "H100-SXM-95GB-HBM2e-low-TDP": "grand_teton",
    "H200-SXM-141GB": "dgx_h200",
    "H800": "dgx_h800",
    "B200-180GB": "dgx_b200",
    "B300-288GB": "dgx_b300",
    "GB200-186GB": "gb200_nvl72",
    "GB300-288GB": "gb300_nvl72",
}
SCHEDULE_NAMES = {
    "ZB-1p": "zero_bubble_h1", "ZB-2p": "zero_bubble_h2", "ZB-V": "zero_bubble_v", "GPipe": "gpipe",
    "DualPipe": "dualpipe", "DualPipeV": "dualpipe_v",
}  # fmt: skip
WIDTHS = {"qwen3": 128, "gpt-oss": 64}  # of the heads of models by name, where they do not share the hidden width
RACK_SHARE = 64  # devices that a job of more than a rack of 72 gets of each, so that groups of 2^n stay inside
ADAPTER = 100e9 / 8  # bytes per second of the usual one of a node whose speed alone is told
VOCABULARY = 50257  # of GPT-2, where a source does not say
LATENT = re.compile(r"deepseek-?(v[23]|r1)|kimi|moonlight")  # names of models with experts whose attention is latent
SPEED = re.compile(r"(\d+(?:\.\d+)?) ?([GT])(?:(B)(?:it|E)?(?:/?p?s)?)?(?![a-z])", re.IGNORECASE)  # of links
MANY = re.compile(r"(\d+) ?[x×] ?(?:[a-z]+ ?)?" + SPEED.pattern, re.IGNORECASE)


class Refused(Exception):
    """The row cannot be planned; the text says why."""


@lru_cache(maxsize=32)
def library_cluster(name: str) -> Cluster:
    """A cluster of the shipped library."""
    from titan.compiler.spec.resolve import load_spec

    with TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.titan"
        path.write_text(
            f"import models.tiny\nimport clusters.nvidia\nmodel = tiny.llama\ncluster = nvidia.{name}\n"
            'train {\n    sequence = 64\n    global_batch = 8\n    data = tokens("some.tokens")\n}\n'
        )
        return load_spec(path).cluster


def cluster(row: Row) -> Cluster:
    """The machine of a row: the library's, with as many nodes, and the network that the source names."""
    name = CLUSTERS.get(row.text("gpu"))
    if name is None:
        raise Refused(f"no cluster for {row.text('gpu')}")
    found, devices = library_cluster(name), row.number("num_gpus")
    if row.eight_bit and "fp8" not in found.device.peak:
        raise Refused(f"8-bit arithmetic, which {row.text('gpu')} has not")
    whole = found.devices_per_node
    if whole <= 8:  # of a rack the source counts its nodes, all of which share the links inside
        whole = min(whole, row.number("gpus_per_node", whole))
    inside = min(whole, devices)
    if devices % inside:
        inside = gcd(devices, inside) if inside <= 8 else (RACK_SHARE if devices % RACK_SHARE == 0 else inside)
    nodes = -(-devices // inside)
    network, efficiency = network_of(row), dict(found.efficiency)
    inter = found.inter
    if network is not None:
        bandwidth, adapters = network
        inter = inter.model_copy(update={"bandwidth": bandwidth})
        efficiency["adapters"] = Efficiency(value=adapters, source="the source of the row")
    return found.model_copy(
        update={"nodes": nodes, "devices_per_node": inside, "inter": inter, "efficiency": efficiency}
    )


def network_of(row: Row) -> tuple[float, float] | None:
    """(bytes per second of an adapter, adapters per device) of "8x200 Gb/s per node", "4x100 Gb/s per node",
    "400 Gb/s per GPU"; "400 Gb/s per node" is four adapters of 100 Gb/s, and faster ones than these where each device
    has its own. Of a speed alone nobody knows what it joins."""
    text, beside = row.text("inter_node"), row.number("gpus_per_node", 8)
    many, one = MANY.search(text), SPEED.search(text)
    if many:
        return _bytes(*many.groups()[1:]), int(many[1]) / beside
    if one is None:
        return None
    speed = _bytes(*one.groups())
    if re.search(r"(per |/ ?)(GPU|device)", text, re.IGNORECASE):
        return speed, 1.0
    if not re.search(r"(per |/ ?)node", text, re.IGNORECASE):
        return None
    each = speed / beside
    return (ADAPTER, each / ADAPTER) if each < ADAPTER else (each, 1.0)


def _bytes(number: str, prefix: str, unit: str | None) -> float:
    """Bytes per second: a large B is bytes, all else bits."""
    return float(number) * (1e12 if prefix in "Tt" else 1e9) / (1 if unit == "B" else 8)


def model(row: Row) -> Model:
    """A decoder of the row's shape: SwiGLU models have RMSNorm, rotary positions and an untied head, others are like
    GPT."""
    hidden, heads = row.number("hidden"), row.number("heads")
    gated = row.text("gated_mlp") == "1" or row.number("num_experts") > 0
    return Model(
        name=row.text("model_name"),
        vocab=row.number("vocab", VOCABULARY),
        hidden=hidden,
        attention=_attention(row, hidden, heads, gated),
        layers=_layers(row, hidden, gated),
        norm="rms_norm" if gated else "layer_norm",
        positions="rope" if gated else "learned",
        rope=Rope(theta=500000.0) if gated else None,
        max_positions=row.number("seq_len"),
        tied=not gated,
    )


def _attention(row: Row, hidden: int, heads: int, gated: bool) -> Attention | Mla:
    name = row.model
    if is_latent(row):
        query_rank = None if "lite" in name or "moonlight" in name else 1536
        return Mla(heads=heads, query_rank=query_rank, kv_rank=512, head_dim=128, rope_dim=64, value_dim=128)
    width = next((told for said, told in WIDTHS.items() if said in name), hidden // heads)
    if width == hidden // heads and hidden % heads:
        raise Refused("heads do not divide the hidden width, and theirs is not told")
    biased = not gated or "gpt-oss" in name
    return Attention(
        heads=heads, kv_heads=row.number("kv_heads", heads), head_dim=width, bias=biased, out_bias=biased,
        qk_norm="qwen3" in name,
    )  # fmt: skip


def is_latent(row: Row) -> bool:
    return row.number("num_experts") > 0 and LATENT.search(row.model) is not None


def _layers(row: Row, hidden: int, gated: bool) -> tuple[LayerGroup, ...]:
    count, dense = row.number("layers"), row.number("dense_layers")
    block = Dense(
        ffn=row.number("ffn_hidden", 4 * hidden), activation="swiglu" if gated else "gelu_tanh", bias=not gated
    )  # fmt: skip
    experts = row.number("num_experts")
    if not experts:
        return (LayerGroup(count=count, block=block),)
    width = row.number("moe_ffn_hidden") or row.number("ffn_hidden")
    mixture = Moe(experts=experts, top_k=row.number("top_k"), ffn=width, shared=row.number("shared_experts"))
    first = (LayerGroup(count=dense, block=block),) if 0 < dense < count else ()
    return (*first, LayerGroup(count=count - (dense if first else 0), block=mixture))


def strategy(row: Row) -> Strategy:
    """The published layout."""
    pipeline, tensor, context = row.number("pp", 1), row.number("tp", 1), row.number("cp", 1)
    data, rest = divmod(row.number("num_gpus"), pipeline * tensor * context)
    if rest:
        raise Refused("degrees do not divide the number of devices")
    chunks = max(row.number("vpp", 1), 1)
    schedule = _schedule(row, chunks)
    chunks = SCHEDULES[schedule].chunks if schedule != "interleaved" else chunks
    micro_batch = row.number("micro_batch")
    if row.number("global_batch_seqs") < data * micro_batch:
        raise Refused("fewer sequences than one micro-batch of every data rank")
    number = round(row.number("global_batch_seqs") / (data * micro_batch))
    zero = row.number("zero_stage")
    parallel = row.text("sequence_parallel") == "true" and tensor > 1
    expert, width = _experts(row, tensor, parallel)
    return Strategy(
        pipeline=pipeline,
        data=data,
        context=context,
        tensor=tensor,
        sequence_parallel=parallel,
        expert=expert,
        expert_tensor=width,
        context_form=_context_form(row, context),
        zero=zero if data * context > 1 else 0,
        shard=8 if "HSDP" in row.text("sharding") and data > 8 else 0,
        gather="once" if zero == 3 and "no reshard" in row.text("sharding") else "each",
        reduce="each" if zero > 1 else "once",
        schedule=schedule if pipeline > 1 else "one_f_one_b",
        recompute="none",
        micro_batch=micro_batch,
        micro_batches=number,
        stages=stages(row, pipeline * (chunks if pipeline > 1 else 1)),
    )


def _schedule(row: Row, chunks: int) -> str:
    """Raises Refused for an order that there is no plan of."""
    told = row.text("schedule")
    if told in ("", "1F1B", "interleaved-1F1B"):
        return "interleaved" if chunks > 1 else "one_f_one_b"
    if told not in SCHEDULE_NAMES and row.number("pp") > 1:
        raise Refused(f"schedule {told}")
    return SCHEDULE_NAMES.get(told, "one_f_one_b")


def _context_form(row: Row, context: int) -> str:
    """Megatron passes keys and values on from rank to rank in zigzag order; torch's own context parallelism balances
    its ranks alike. No ring of ours passes latent keys on."""
    return "gathered" if context == 1 or is_latent(row) else "ring"


def _experts(row: Row, tensor: int, sequence_parallel: bool) -> tuple[int, int]:
    """(ranks that share experts, tensor ranks that share the width of each); without a word tensor ranks share experts
    where they can."""
    expert, width = row.number("ep", 1), row.number("etp")
    if not row.number("num_experts"):
        return 1, 1
    if not width:
        width = 1 if expert % tensor == 0 and sequence_parallel else tensor
    return expert, width if width in (1, tensor) else tensor


def stages(row: Row, chunks: int) -> tuple[int, ...]:
    """Layers of each chunk: equal, or with fewer in the first and the last where that comes out even."""
    layers = row.number("layers")
    if chunks - 2 <= layers < chunks and chunks > 2:
        return (0, *even_stages(layers, chunks - 2), 0) if layers == chunks - 2 else (*even_stages(layers, layers), 0)
    if layers < chunks:
        raise Refused("fewer layers than chunks of stages")
    if chunks > 1 and layers % chunks and (layers + 2) % chunks == 0:
        inner = (layers + 2) // chunks
        return (inner - 1, *[inner] * (chunks - 2), inner - 1)
    return even_stages(layers, chunks)


def planned(row: Row) -> tuple[Spec, Strategy]:
    """Spec and strategy of a row. Raises Refused with the first rule that the layout breaks."""
    found = strategy(row)
    batch = found.data * found.micro_batch * found.micro_batches
    precision: Literal["bf16", "fp8"] = "fp8" if row.eight_bit else "bf16"
    train = Train(sequence=row.number("seq_len"), global_batch=batch, precision=precision, data="synthetic")
    machine = cluster(row)
    listed = Parallel(stages=Wish("=", (found.stages,)))
    spec = Spec(model(row), machine, train, listed, Objective(memory_fraction=1.0))
    broken = [p for p in legal(spec, found) if p.code not in ("T240", "T224")]
    if broken:
        raise Refused(f"{broken[0].code}: {broken[0].message.partition(';')[0]}")
    return spec, found


def shortened(found: Strategy, spec: Spec, micro_batches: int) -> tuple[Spec, Strategy]:
    """The same layout with fewer micro-batches per step."""
    batch = found.data * found.micro_batch * micro_batches
    train = spec.train.model_copy(update={"global_batch": batch})
    return replace(spec, train=train), replace(found, micro_batches=micro_batches)
