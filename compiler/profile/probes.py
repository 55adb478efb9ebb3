"""Small plans whose steps show what operators cost: one or two layers, from launch-bound to bandwidth-bound sizes.

Plans for one rank are run by as many processes as there are cores, each by itself; plans for two ranks have the
operators that only a sharded model has.
"""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Any

from titan.compiler.lower import lower
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.program import Plan
from titan.compiler.spec.resolve import resolve
from titan.compiler.strategy import Strategy
from titan.grammar.parser import parse

MICRO_BATCHES = 2
LAUNCHED = 1 << 28  # multiplications in the time in which the calls of a layer are made


@dataclass(frozen=True, slots=True)
class Probe:
    """A model by its widths; `choices` are those of the strategy."""

    hidden: int
    ffn: int
    heads: int
    vocab: int
    sequence: int
    micro_batch: int = 1
    layers: int = 2
    family: str = "llama"
    precision: str = "fp32"
    choices: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return int(self.choices.get("tensor", 1) * self.choices.get("context", 1))

    @property
    def bytes(self) -> int:
        """At most 20 for a parameter, and 60 for each element that a layer keeps for backward."""
        width = 4 * self.hidden + 3 * self.ffn
        layers = self.layers * (self.hidden * width + self.sequence * self.micro_batch * width * 3)
        return 20 * (layers + 2 * self.vocab * self.hidden)

    def __str__(self) -> str:
        choices = "".join(f", {key} {value}" for key, value in self.choices.items())
        return (
            f"{self.family} {self.hidden} wide, {self.micro_batch} x {self.sequence} tokens, {self.precision}{choices}"
        )

    @property
    def work(self) -> float:
        """About as many multiplications as a step's time is worth: those of a forward, and what its calls take."""
        tokens = MICRO_BATCHES * self.micro_batch * self.sequence
        layer = self.hidden * (4 * self.hidden + 3 * self.ffn + 2 * self.sequence)
        return tokens * (self.layers * layer + self.vocab * self.hidden) + LAUNCHED * self.layers

    @property
    def steps(self) -> int:
        """Fewer of what takes long: its noise is small."""
        return 6 if self.hidden * self.sequence * self.micro_batch <= 1 << 16 else 2

    @property
    def least(self) -> int:
        """Steps with which it is worth its beginning."""
        return self.steps // 2


_FAMILIES = {
    "llama": ("", "norm = rms_norm, positions = rope, rope = { theta = 10000 }", ""),
    "gpt2": (
        ", activation = gelu_tanh, bias = true",
        "norm = layer_norm, positions = learned",
        ", bias = true, out_bias = true",
    ),
}


def plan_of(probe: Probe) -> Plan:
    """The plan, on the unmeasured machine."""
    block, model, attention = _FAMILIES[probe.family]
    text = f"""import clusters.local
model = model {{
    vocab = {probe.vocab}, hidden = {probe.hidden}, layers = {probe.layers} * dense {{ ffn = {probe.ffn}{block} }}
    attention = gqa {{ heads = {probe.heads}, kv_heads = {probe.heads}{attention} }}, max_positions = {probe.sequence}
    {model}
}}
cluster = local.cpu with {{ devices_per_node = {probe.ranks} }}
train {{
    sequence = {probe.sequence}, global_batch = {MICRO_BATCHES * probe.micro_batch}, precision = {probe.precision}
    optimizer = adamw {{ learning_rate = 1e-4 }}, steps = 100, clip = 0.5, data = synthetic({probe.vocab})
}}
"""
    strategy = Strategy(
        **probe.choices, micro_batch=probe.micro_batch, micro_batches=MICRO_BATCHES, stages=(probe.layers,)
    )
    return lower(resolve(parse(text, "probe.titan"), Path()), strategy)


def _sized(precision: str) -> tuple[Probe, ...]:
    return (
        Probe(64, 192, 4, 256, 64, precision=precision),
        Probe(128, 384, 4, 512, 128, precision=precision),
        Probe(256, 768, 4, 1024, 128, precision=precision),
        Probe(256, 768, 4, 1024, 32, precision=precision),
        Probe(256, 1024, 8, 2048, 256, 4, precision=precision),
        Probe(256, 768, 4, 1024, 1024, precision=precision),
        Probe(512, 1536, 8, 4096, 256, 2, precision=precision),
        Probe(1024, 3072, 16, 4096, 256, 1, layers=1, precision=precision),
        Probe(128, 512, 4, 512, 64, family="gpt2", precision=precision),
        Probe(256, 1024, 4, 1024, 128, 4, family="gpt2", precision=precision),
        Probe(512, 2048, 8, 2048, 256, 2, family="gpt2", precision=precision),
        Probe(256, 768, 4, 1024, 128, precision=precision, choices={"loss_rows": 64}),
        Probe(256, 768, 4, 4096, 256, 4, precision=precision, choices={"loss_rows": 256}),
    )


def _shared(precision: str) -> tuple[Probe, ...]:
    """Plans for two ranks."""
    widths = ((128, 384, 4, 512, 128, 1), (256, 768, 4, 1024, 256, 2), (512, 1536, 8, 2048, 512, 1))
    choices: tuple[dict[str, Any], ...] = (
        {"tensor": 2},
        {"context": 2, "context_form": "ring"},
        {"context": 2, "context_form": "ring", "context_order": "contiguous"},
        {"context": 2},
        {"context": 2, "context_form": "heads"},
        {"tensor": 2, "loss_rows": 128},
    )
    return tuple(Probe(*w[:5], w[5], precision=precision, choices=c) for c in choices for w in widths)


QUICK = (
    Probe(64, 192, 4, 256, 64),
    Probe(256, 768, 4, 1024, 128),
    Probe(128, 512, 4, 512, 64, family="gpt2"),
    Probe(128, 384, 4, 512, 128, choices={"tensor": 2}),
)


def _large() -> tuple[Probe, ...]:
    """What fills a GPU."""
    return (
        Probe(512, 1536, 8, 4096, 512, 2, precision="bf16"),
        Probe(1024, 2816, 8, 32000, 2048, 4, precision="bf16"),
        Probe(2048, 5632, 16, 32000, 2048, 4, precision="bf16"),
        Probe(2048, 8192, 32, 65536, 4096, 2, layers=1, precision="bf16", choices={"loss_rows": 1024}),
        Probe(4096, 11008, 32, 32000, 2048, 1, layers=1, precision="bf16"),
        Probe(4096, 14336, 32, 65536, 8192, 1, layers=1, precision="bf16", choices={"loss_rows": 1024}),
        Probe(8192, 28672, 64, 32000, 4096, 1, layers=1, precision="bf16"),
        Probe(1024, 4096, 16, 50304, 1024, 8, family="gpt2", precision="bf16"),
        Probe(2048, 8192, 16, 50304, 2048, 2, family="gpt2", precision="bf16"),
    )


def probes(ranks: int, device: str, memory: int, quick: bool = False) -> tuple[Probe, ...]:
    """What is run on `ranks` processes, on a `device` (cpu, cuda) of `memory` bytes for each; the least first, which
    show early how fast the machine is in each precision."""
    narrow = (p for p in (*_sized("bf16"), *_shared("bf16")) if p.hidden * p.sequence <= 1 << 16)
    wide = (*narrow,) if device == "cpu" else (*_shared("bf16"), *_large())
    chosen = QUICK if quick else (*_sized("fp32"), *_shared("fp32"), *wide)
    return tuple(sorted((p for p in chosen if p.ranks <= ranks and p.bytes <= memory / 2), key=lambda p: p.work))
