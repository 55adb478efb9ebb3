"""The layouts that are measured, and the questions that the search is asked about them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from titan.compiler.lower import lower
from titan.compiler.plan.program import Plan
from titan.compiler.schedules.registry import SCHEDULES
from titan.compiler.search.search import search
from titan.compiler.spec.resolve import resolve
from titan.compiler.spec.schema import Spec
from titan.compiler.strategy import Strategy
from titan.grammar.parser import parse

BATCH = 8
MODELS = {
    "llama": (
        4,
        """vocab = 1024, hidden = 256, layers = 4 * dense { ffn = 704 }, max_positions = 128, norm = rms_norm
    attention = gqa { heads = 8, kv_heads = 4 }, positions = rope, rope = { theta = 10000 }""",
        128,
    ),
    "gpt2": (
        8,
        """vocab = 640, hidden = 192, layers = 8 * dense { ffn = 768, activation = gelu_tanh, bias = true }
    attention = gqa { heads = 6, kv_heads = 6, bias = true, out_bias = true }, max_positions = 192
    norm = layer_norm, positions = learned""",
        192,
    ),
}


@dataclass(frozen=True, slots=True)
class Layout:
    """A model on so many ranks with the choices of a strategy, or the strategy that the search chose."""

    model: str
    ranks: int
    choices: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        words = (f"{k}={v}" if not isinstance(v, bool) else k for k, v in self.choices.items())
        return f"{self.model} on {self.ranks}: {' '.join(words)}"


def spec_of(model: str, ranks: int, profile: Path, pins: str = "") -> Spec:
    """On the measured machine of the file `profile`."""
    _, written, sequence = MODELS[model]
    text = f"""import {profile.stem}
model = model {{
    {written}
}}
cluster = {profile.stem}.here with {{ devices_per_node = {ranks} }}
train {{
    sequence = {sequence}, global_batch = {BATCH}, precision = fp32, steps = 100, clip = 0.5
    optimizer = adamw {{ learning_rate = 1e-4 }}, data = synthetic(512)
}}
parallel {{ {pins} }}
"""
    return resolve(parse(text, str(profile.with_name("layout.titan"))), profile.parent)


def plan_of(layout: Layout, profile: Path) -> Plan:
    layers = MODELS[layout.model][0]
    some = Strategy(**layout.choices)
    row = SCHEDULES[some.schedule]
    chunks = some.pipeline * row.chunks // row.copies
    strategy = replace(some, micro_batches=BATCH // some.data // some.micro_batch, stages=(layers // chunks,) * chunks)
    return lower(spec_of(layout.model, layout.ranks, profile), strategy)


_TWO: tuple[dict[str, Any], ...] = (
    {"data": 2},
    {"data": 2, "micro_batch": 4, "zero": 1},
    {"data": 2, "zero": 3},
    {"tensor": 2},
    {"tensor": 2, "sequence_parallel": True, "micro_batch": 4},
    {"pipeline": 2},
    {"pipeline": 2, "schedule": "zero_bubble_h1"},
    {"context": 2, "context_form": "ring", "micro_batch": 2},
    {"context": 2, "micro_batch": 8},
    {"data": 2, "recompute": "full"},
)
_FOUR: tuple[dict[str, Any], ...] = (
    {"data": 4},
    {"data": 4, "zero": 3, "micro_batch": 2},
    {"tensor": 4, "micro_batch": 8},
    {"pipeline": 4},
    {"pipeline": 4, "schedule": "gpipe", "micro_batch": 2},
    {"pipeline": 2, "data": 2, "zero": 1},
    {"tensor": 2, "data": 2, "micro_batch": 4},
    {"tensor": 2, "pipeline": 2, "micro_batch": 2},
    {"context": 2, "data": 2, "micro_batch": 2},
    {"pipeline": 2, "data": 2, "schedule": "interleaved"},
)


def layouts(models: tuple[str, ...]) -> tuple[Layout, ...]:
    """Those whose prediction is scored; six heads are no multiple of four ranks."""
    return tuple(
        Layout(model, ranks, choices)
        for model in models
        for ranks, some in ((2, _TWO), (4, _FOUR))
        for choices in some
        if model == "llama" or choices.get("tensor") != 4
    )


@dataclass(frozen=True, slots=True)
class Case:
    """A model and ranks with what is pinned, as a spec says it."""

    model: str
    ranks: int
    pins: str = ""
    wanted: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def choose(self, profile: Path) -> Plan:
        return search(spec_of(self.model, self.ranks, profile, self.pins)).plan


def _case(model: str, ranks: int, **wanted: Any) -> Case:
    pins = "\n".join(f"{key} = {value}" for key, value in wanted.items())
    return Case(model, ranks, pins, {key: (value,) for key, value in wanted.items()})


def cases(models: tuple[str, ...]) -> tuple[Case, ...]:
    """Twenty in all: for each model and number of ranks, free, and with one axis or choice pinned."""
    wishes: dict[int, tuple[dict[str, Any], ...]] = {
        2: ({}, {"data": 1}, {"data": 2}, {"pipeline": 2}, {"context": 2}),
        4: ({}, {"data": 4}, {"data": 2}, {"pipeline": 2}, {"pipeline": 4}),
    }
    return tuple(_case(m, ranks, **wish) for m in models for ranks, some in wishes.items() for wish in some)
