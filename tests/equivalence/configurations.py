"""The grid on which a distributed plan must equal one process: meshes, switches of the strategy, kinds of models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import combinations, product
from math import lcm, prod
from pathlib import Path
from random import Random
from typing import Any

from titan.compiler.schedules.registry import SCHEDULES
from titan.compiler.spec.parallel import CHOICES
from titan.compiler.spec.resolve import resolve
from titan.compiler.spec.schema import Spec
from titan.compiler.strategy import Strategy
from titan.grammar.parser import parse

RANKS = 16
LEARNING_RATE = 0.01
AXES = ("data", "tensor", "pipeline", "context")
SAMPLED = (1, 2, 3, 4, 8, 16)  # degrees of the pairwise sample; the grid has every degree


@dataclass(frozen=True, slots=True)
class Configuration:
    """A cell of the grid.

    stages  `even`, `uneven` (one stage with a layer more) or `ends` (embedding and head alone on the outer stages)
    zero    a stage, or one of `SHARDINGS`
    family  `llama`, `gpt2`, `dropout` (gpt2 with dropout), `kv_one` (one KV head), `kv_few` (half as many as ranks),
            `window` (llama whose layers see few tokens and all before, in turn)
    odd     a prime vocabulary, which has to be padded
    filled  a sequence one token short of what its ranks divide, which is filled up
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    sequence_parallel: bool = False
    zero: int | str = 0
    recompute: str = "none"
    offload: str = "none"
    context_form: str = "gathered"
    schedule: str = "one_f_one_b"
    stages: str = "even"
    family: str = "llama"
    tied: bool = False
    odd: bool = False
    filled: bool = False

    def __str__(self) -> str:
        mesh = "".join(f"{axis[0]}{getattr(self, axis)}" for axis in AXES)
        words = [name for name in ("sequence_parallel", "tied", "odd", "filled") if getattr(self, name)]
        words += [f"zero{self.zero}"] if self.zero else []
        words += [f"offload_{self.offload}"] if self.offload != "none" else []
        for name in ("recompute", "context_form", "schedule", "stages", "family"):
            if getattr(self, name) != getattr(Configuration(), name) or name == "family":
                words.append(str(getattr(self, name)))
        return "-".join((mesh, *words))


NAMES = tuple(f.name for f in fields(Configuration))


def switches(mesh: tuple[int, ...]) -> dict[str, tuple[Any, ...]]:
    """Values of every other field that mean something on (data, tensor, pipeline, context)."""
    data, tensor, pipeline, context = mesh
    stages = ("even", "uneven", "ends") if pipeline > 1 else ("even",)
    few = ("kv_few",) if tensor % 2 == 0 and tensor > 2 else ()
    return {
        "sequence_parallel": (False, True) if tensor > 1 else (False,),
        "zero": _shardings(data, context),
        "recompute": CHOICES["recompute"].now,
        "offload": CHOICES["offload"].now,
        "context_form": _context_forms(context),
        "schedule": _schedules(pipeline),
        "stages": stages,
        "family": ("llama", "gpt2", "dropout", "kv_one", *few, "window"),
        "tied": (False, True),
        "odd": (False, True),
        "filled": (False, True) if tensor * context > 1 else (False,),
    }


def _context_forms(context: int) -> tuple[str, ...]:
    """All; rings only up to six ranks, since each of n ranks takes n steps for every attention."""
    if context == 1:
        return ("gathered",)
    return tuple(form for form in CHOICES["context_form"].now if form != "ring" or context <= 6)


def _schedules(pipeline: int) -> tuple[str, ...]:
    """All that are defined; on long pipelines only the two with one chunk per rank and a full backward."""
    if pipeline == 1:
        return ("one_f_one_b",)
    if pipeline > 4:
        return ("one_f_one_b", "gpipe")
    return tuple(name for name in SCHEDULES if _micro_batches(name, pipeline))


def _micro_batches(schedule: str, pipeline: int) -> int:
    """A small legal number of micro-batches, 0 when there is none. One more than stages where that is legal: so some
    rank has fewer in flight than it has to do."""
    first = 2 if pipeline == 1 else pipeline + 1 if pipeline <= 3 else 3
    return next((m for m in range(first, first + 3 * pipeline) if SCHEDULES[schedule].legal(pipeline, m)), 0)


def chunks(c: Configuration) -> int:
    """Chunks of one copy of the model."""
    return SCHEDULES[c.schedule].make(c.pipeline, _micro_batches(c.schedule, c.pipeline)).chunks_per_copy


def possible(c: Configuration) -> bool:
    """Head exchange needs a KV head for every rank that it exchanges with."""
    return c.context_form != "heads" or c.family not in ("kv_one", "kv_few")


# ZeRO-3 that gathers or reduces once a step instead of for each micro-batch; HSDP: shards over half of the data ranks
SHARDINGS: dict[int | str, dict[str, Any]] = {
    "3-hold": {"zero": 3, "gather": "once", "reduce": "once"},
    "3-gather-once": {"zero": 3, "gather": "once", "prefetch": 0},
    "3-reduce-once": {"zero": 3, "reduce": "once", "prefetch": 2},
    "1-half": {"zero": 1, "shard": 2},
    "2-half": {"zero": 2, "shard": 2},
    "3-half": {"zero": 3, "shard": 2},
}


def _shardings(data: int, context: int) -> tuple[int | str, ...]:
    if data * context == 1:
        return (0,)
    return CHOICES["zero"].now + tuple(name for name in SHARDINGS if "half" not in str(name) or data == 4)


def meshes(degrees: tuple[int, ...], ranks: int = RANKS) -> tuple[tuple[int, ...], ...]:
    return tuple(mesh for mesh in product(degrees, repeat=len(AXES)) if prod(mesh) <= ranks)


def cells(mesh: tuple[int, ...]) -> Iterator[Configuration]:
    """All configurations on one mesh."""
    table = switches(mesh)
    for values in product(*table.values()):
        found = Configuration(*mesh, **dict(zip(table, values, strict=True)))
        if possible(found):
            yield found


def grid(ranks: int = RANKS) -> Iterator[Configuration]:
    """Every mesh of up to `ranks` ranks with every switch of the strategy and every kind of model."""
    for mesh in meshes(tuple(range(1, ranks + 1)), ranks):
        yield from cells(mesh)


Pair = tuple[str, Any, str, Any]


def pairs(c: Configuration) -> set[Pair]:
    return {(a, getattr(c, a), b, getattr(c, b)) for a, b in combinations(NAMES, 2)}


def feasible_pairs(degrees: tuple[int, ...], ranks: int = RANKS) -> set[Pair]:
    """All pairs of values of two fields that some configuration has."""
    found: set[Pair] = set()
    for mesh in meshes(degrees, ranks):
        base = Configuration(*mesh)
        table = switches(mesh)
        found |= pairs(base)
        for a, b in combinations(table, 2):
            for left, right in product(table[a], table[b]):
                cell = replace(base, **{a: left, b: right})
                if possible(cell):
                    found |= pairs(cell)
    return found


def pairwise(at_least: int, degrees: tuple[int, ...] = SAMPLED) -> tuple[Configuration, ...]:
    """A deterministic sample in which every feasible pair of values occurs, filled up with random cells."""
    random, missing = Random(0), feasible_pairs(degrees)
    candidates = meshes(degrees)
    chosen: dict[Configuration, None] = {}
    while missing:
        wanted = min(missing, key=repr)
        drawn = [cell for cell in (_draw(random, candidates, wanted) for _ in range(40)) if cell is not None]
        if not drawn:
            continue
        best = max(drawn, key=lambda cell: len(pairs(cell) & missing))
        chosen[best] = None
        missing -= pairs(best)
    while len(chosen) < at_least:
        cell = _draw(random, candidates, None)
        if cell is not None:
            chosen[cell] = None
    return tuple(chosen)


def _draw(random: Random, candidates: tuple[tuple[int, ...], ...], wanted: Pair | None) -> Configuration | None:
    fixed = {wanted[0]: wanted[1], wanted[2]: wanted[3]} if wanted else {}
    fitting = [m for m in candidates if all(m[AXES.index(a)] == v for a, v in fixed.items() if a in AXES)]
    mesh = random.choice(fitting)
    table = switches(mesh)
    if any(name in table and value not in table[name] for name, value in fixed.items()):
        return None
    chosen = {name: fixed.get(name, random.choice(values)) for name, values in table.items()}
    cell = Configuration(*mesh, **chosen)
    return cell if possible(cell) else None


# --- what a configuration means


def layers_per_stage(c: Configuration) -> tuple[int, ...]:
    """Layers of every chunk."""
    if c.pipeline == 1:
        return (2,)
    count = chunks(c)
    if c.stages == "uneven":
        return tuple(2 if stage == count // 2 else 1 for stage in range(count))
    if c.stages == "ends":
        return (0, 1) if count == 2 else (0, *((1,) * (count - 2)), 0)
    return (1,) * count


def spec_of(c: Configuration, precision: str = "fp64", scale: int = 1) -> Spec:
    """A model just large enough for the layout: every rank has a head, a column of ffn and a place of the sequence;
    `scale`: how many times as wide and as long."""
    parts = c.tensor * c.context
    per_rank = parts if c.context_form == "heads" else c.tensor
    kv_heads = {"kv_one": 1, "kv_few": max(1, c.tensor // 2)}.get(c.family, per_rank)
    llama = c.family in ("llama", "window")
    heads = lcm(2, per_rank) if llama or c.family.startswith("kv") else per_rank
    heads = heads * 2 if heads == kv_heads and llama else heads
    vocab = (37 if c.odd else 8 * c.tensor) * scale
    sequence = scale * parts * max(-(-8 // parts), 1 + c.filled) * (2 if c.context_form == "ring" else 1) - c.filled
    text = _MODELS["gpt2" if c.family in ("gpt2", "dropout") else "llama"].format(
        vocab=vocab, heads=heads, kv_heads=kv_heads, layers=_layers(c, scale * c.tensor * -(-12 // c.tensor)),
        hidden=16 * scale, width=4 * scale, tied=str(c.tied).lower(), sequence=sequence,
        dropout=0.25 if c.family == "dropout" else 0,
    )  # fmt: skip
    strategy = strategy_of(c)
    batch = c.data * strategy.micro_batch * strategy.micro_batches
    host = "host_memory = 8 GiB, host_link = link { bandwidth = 5 GB/s, latency = 10 us }"
    cluster = f"cluster = local.cpu with {{ devices_per_node = {strategy.world_size}, {host} }}"
    settings = f"sequence = {sequence}, global_batch = {batch}, precision = {precision}, steps = 4, clip = 0.2"
    optimizer = f"optimizer = adamw {{ learning_rate = {LEARNING_RATE}, weight_decay = 0.1 }}, warmup_steps = 1"
    listed = f"parallel {{ stages = {list(strategy.stages)} }}"  # stages without a layer must be listed
    train = f"train {{ {settings}, {optimizer}, data = synthetic({vocab}) }}"
    return resolve(parse(f"import clusters.local\n{text}\n{cluster}\n{train}\n{listed}\n", "equivalence.titan"), Path())


def _layers(c: Configuration, ffn: int) -> str:
    number = sum(layers_per_stage(c))
    if c.family == "window":
        return " + ".join(f"dense {{ ffn = {ffn}{'' if layer % 2 else ', window = 3'} }}" for layer in range(number))
    gpt2 = ", activation = gelu_tanh, bias = true" if c.family in ("gpt2", "dropout") else ""
    return f"{number} * dense {{ ffn = {ffn}{gpt2} }}"


def with_train(spec: Spec, **changes: Any) -> Spec:
    """The spec with other training settings."""
    return replace(spec, train=spec.train.model_copy(update=changes))


_MODELS = {
    "llama": """model = model {{
    vocab = {vocab}, hidden = {hidden}, layers = {layers}, max_positions = {sequence}
    attention = gqa {{ heads = {heads}, kv_heads = {kv_heads}, head_dim = {width} }}, norm = rms_norm
    positions = rope, rope = {{ theta = 10000 }}, tied = {tied}, dropout = {dropout}, init_std = 0.3
}}""",
    "gpt2": """model = model {{
    vocab = {vocab}, hidden = {hidden}, max_positions = {sequence}, norm = layer_norm, positions = learned
    layers = {layers}
    attention = gqa {{ heads = {heads}, kv_heads = {kv_heads}, head_dim = {width}, bias = true, out_bias = true }}
    tied = {tied}, dropout = {dropout}, init_std = 0.3
}}""",
}


def strategy_of(c: Configuration) -> Strategy:
    small = prod(getattr(c, axis) for axis in AXES) <= 4
    return Strategy(
        pipeline=c.pipeline, data=c.data, context=c.context, tensor=c.tensor, sequence_parallel=c.sequence_parallel,
        context_form=c.context_form, schedule=c.schedule, recompute=c.recompute,
        offload=c.offload,
        **SHARDINGS.get(c.zero, {"zero": c.zero}),
        micro_batch=2 if small else 1, micro_batches=_micro_batches(c.schedule, c.pipeline), stages=layers_per_stage(c),
    )  # fmt: skip


def single_strategy(spec: Spec) -> Strategy:
    """One process, the whole global batch as one micro-batch."""
    return Strategy(micro_batch=spec.train.global_batch, stages=(spec.model.layer_count,))
