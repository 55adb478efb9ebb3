"""Which strategies are legal for a spec: a row per rule, with code, sentence, test and nearest legal values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import prod

from titan.compiler.plan.frozen import dataclass
from titan.compiler.schedules.registry import SCHEDULES, legal_counts, schedule_row
from titan.compiler.spec.breach import Breach, Choices
from titan.compiler.spec.context_rules import (
    head_exchange,
    latent_ring,
    pieces,
    ring_heads,
)
from titan.compiler.spec.degrees import AXES, shared_width, tensor_degrees
from titan.compiler.spec.divisors import around, divisors, even_stages, factorisation, multiples
from titan.compiler.spec.expert_rules import among_ranks, expert_tensor, experts, shared_by_tensor, whole_experts
from titan.compiler.spec.parallel import CHOICES
from titan.compiler.spec.schema import Spec
from titan.grammar.diagnostics import Diagnostic, Note


@dataclass(frozen=True, slots=True)
class Rule:
    """`needs` are the choices that `breach` reads; a `partial` rule says part of another one when less is known."""

    code: str
    sentence: str
    needs: tuple[str, ...]
    breach: Callable[[Spec, Choices], Breach | None]
    partial: bool = False


def legal(spec: Spec, strategy: Choices) -> tuple[Diagnostic, ...]:
    """Every rule that the strategy breaks; empty when it is legal. With a degree below 1 the others have no meaning."""
    degrees, *others = RULES
    first = degrees.breach(spec, strategy)
    if first is not None:
        return (diagnostic(spec, degrees, first),)
    found = ((rule, rule.breach(spec, strategy)) for rule in others if not rule.partial)
    return tuple(diagnostic(spec, rule, breach) for rule, breach in found if breach is not None)


def is_legal(spec: Spec, strategy: Choices, rules: Iterable[Rule] = ()) -> bool:
    """True when no rule, or none of these, is broken; stops at the first that is."""
    return all(rule.breach(spec, strategy) is None for rule in rules or RULES if not rule.partial)


def diagnostic(spec: Spec, rule: Rule, breach: Breach) -> Diagnostic:
    """A breach at the line where the user wrote the choice, with notes at the lines that it collides with."""
    paths = [f"parallel.{key}" for key in (breach.at, *rule.needs)] + [breach.at]
    span = next((origin.span for p in paths if (origin := spec.origin(p)).span is not None), None)
    notes = tuple(Note(text, spec.span(path)) for text, path in breach.facts)
    return Diagnostic(rule.code, breach.message, span, nearest=breach.nearest, notes=notes)


def _positive(spec: Spec, s: Choices) -> Breach | None:
    for axis in ("region", *AXES, "micro_batch"):
        if getattr(s, axis) < 1:
            return Breach(f"{axis} = {getattr(s, axis)} is not possible: use 1 to disable", axis, ("1",))
    return None


def _world(spec: Spec, s: Choices) -> Breach | None:
    degrees = {axis: getattr(s, axis) for axis in AXES}
    world, product = spec.cluster.world_size, s.region * prod(degrees.values())
    if product == world or product < 1:
        return None
    facts = [(f"the cluster has {world} devices: {_size(spec)}", "cluster.nodes")]
    if degrees["context"] > 1 and degrees["data"] > 1:
        text = "context takes its own factor of the world size; weights may still be sharded over data x context"
        facts.append((text, "parallel.context"))
    message = f"{factorisation(degrees)} = {product} ranks, but the cluster has {world}"
    return Breach(message, "data", _absorbers(degrees, product, world), tuple(facts))


def _size(spec: Spec) -> str:
    return f"{spec.cluster.nodes} nodes x {spec.cluster.devices_per_node} devices"


def _absorbers(degrees: dict[str, int], product: int, world: int) -> tuple[str, ...]:
    """Single changes that make the product right: of the data degree first, of others when that cannot."""
    fitted = {axis: world * degree // product for axis, degree in degrees.items() if world * degree % product == 0}
    fitted = {axis: degree for axis, degree in fitted.items() if degree >= 1}
    order = ["data", *(axis for axis in ("context", "pipeline", "tensor"))]
    possible = [f"{axis} = {fitted[axis]}" for axis in order if axis in fitted]
    return tuple(possible[:1] if product < world else possible)


def _heads(spec: Spec, s: Choices) -> Breach | None:
    attention = spec.model.attention
    heads = attention.heads if attention else 0
    if heads % s.tensor == 0:
        return None
    facts = ((f"heads = {heads}", "model.attention.heads"),)
    message = f"tensor = {s.tensor} does not divide {heads} attention heads"
    return Breach(message, "tensor", around(tensor_degrees(spec), s.tensor), facts)


def _kv_heads(spec: Spec, s: Choices) -> Breach | None:
    attention = spec.model.attention
    kv = attention.kv_heads if attention else s.tensor
    if s.tensor % kv == 0 or kv % s.tensor == 0 or _heads(spec, s):
        return None
    facts = ((f"kv_heads = {kv}", "model.attention.kv_heads"),)
    message = f"tensor = {s.tensor} and kv_heads = {kv}: one must divide the other, so that ranks share whole heads"
    return Breach(message, "tensor", around(tensor_degrees(spec), s.tensor), facts)


def _ffn(spec: Spec, s: Choices) -> Breach | None:
    for index, group in enumerate(spec.model.layers):
        width = shared_width(group.block)
        if width % s.tensor:
            facts = ((f"ffn = {width}", f"model.layers.{index}.block.ffn"),)
            message = f"tensor = {s.tensor} does not divide the feed-forward width {width}"
            return Breach(message, "tensor", around(tensor_degrees(spec), s.tensor), facts)
    return None


def _positions(spec: Spec, s: Choices) -> Breach | None:
    sequence, most = spec.train.sequence, spec.model.max_positions
    if sequence <= most or spec.model.positions == "none":
        return None
    facts = ((f"max_positions = {most}", "model.max_positions"),)
    message = f"sequence = {sequence} is longer than the {most} positions of the model"
    return Breach(message, "train.sequence", (f"sequence <= {most}", f"max_positions = {sequence}"), facts)


def _batch(spec: Spec, s: Choices) -> Breach | None:
    return _multiple_of(spec, s.data * s.micro_batch, f"data {s.data} x micro_batch {s.micro_batch}", "micro_batch")


def _batch_over_data(spec: Spec, s: Choices) -> Breach | None:
    return _multiple_of(spec, s.data, f"data {s.data}", "data")


def _batch_of_micro(spec: Spec, s: Choices) -> Breach | None:
    return _multiple_of(spec, s.micro_batch, f"micro_batch {s.micro_batch}", "micro_batch")


def _multiple_of(spec: Spec, unit: int, written: str, at: str) -> Breach | None:
    batch = spec.train.global_batch
    if batch % unit == 0:
        return None
    equation = written if written.endswith(f" {unit}") and " x " not in written else f"{written} = {unit}"
    message = f"global_batch = {batch} sequences is not a multiple of {equation}"
    message += f" ({batch} = {unit} x {batch // unit} + {batch % unit})"
    near = tuple(f"global_batch = {m}" for m in multiples(batch, unit))
    facts = (("global_batch = data x micro_batch x micro-batches per step", "train.global_batch"),)
    return Breach(message, at, near, facts)


def _pipeline(spec: Spec, s: Choices) -> Breach | None:
    layers, ends = spec.model.layer_count, _listed_ends(spec, s.pipeline)
    if s.pipeline <= layers + ends:
        return None
    message = f"pipeline = {s.pipeline} stages cannot share {layers} layers: some would be empty"
    facts = [(f"the model has {layers} layers", "model.layers")]
    if s.pipeline <= layers + 2 and not ends:
        written = ", ".join(map(str, (0, *even_stages(layers, s.pipeline - 2), 0))) if s.pipeline - 2 else "0, 0"
        facts.append(
            (f"stages that hold only the embedding or the head must be listed: stages = [{written}]", "parallel.stages")
        )
    return Breach(message, "pipeline", (f"pipeline <= {layers}",), tuple(facts))


def _listed_ends(spec: Spec, chunks: int) -> int:
    """Chunks without layers that the user listed at the two ends."""
    stages = spec.parallel.stages.value
    return (stages[0] == 0) + (stages[-1] == 0) if stages and len(stages) == chunks > 1 else 0


def _chunk_layers(spec: Spec, s: Choices) -> Breach | None:
    layers, number = spec.model.layer_count, s.pipeline * s.chunks
    if s.chunks == 1 or number <= layers + _listed_ends(spec, number):
        return None
    message = f"pipeline {s.pipeline} x chunks {s.chunks} = {number} chunks cannot share {layers} layers"
    near = tuple(f"{axis} <= {layers // other}" for axis, other in (("pipeline", s.chunks), ("chunks", s.pipeline)))
    near = tuple(n for n in near if not n.endswith(" 0"))
    return Breach(message, "schedule", near, ((f"the model has {layers} layers", "model.layers"),))


def _chunks(spec: Spec, s: Choices) -> Breach | None:
    row = schedule_row(s.schedule)
    if row.takes(s.chunks) or (s.pipeline == 1 and s.chunks == 1):
        return None
    number = f"{row.chunks} to {row.most_chunks}" if row.most_chunks else str(row.chunks)
    message = f"{s.schedule} holds {number} chunks per rank, not {s.chunks}"
    near = (f"chunks = {row.chunks}", *(f"schedule = {name}" for name, r in SCHEDULES.items() if r.takes(s.chunks)))
    facts = (("`stages` lists one entry per chunk: pipeline x chunks", "parallel.stages"),)
    return Breach(message, "schedule", near, facts)


def _counts(spec: Spec, s: Choices) -> Breach | None:
    row, batch, unit = schedule_row(s.schedule), spec.train.global_batch, s.data * s.micro_batch
    number = batch // unit
    alone = s.pipeline == 1 and not row.size and len(spec.parallel.stages.value or ()) < 2  # then no schedule matters
    if alone or batch % unit or row.legal(s.pipeline, number):
        return None
    message = f"{s.schedule} needs {row.rule}; here pipeline = {s.pipeline} and there are {number} micro-batches"
    counts = legal_counts(row, s.pipeline, number)
    near = [f"global_batch = {m * unit} ({m} micro-batches)" for m in counts]
    if not counts:
        tried = [(p, 4 * p) for p in (s.pipeline - 1, s.pipeline + 1)] if row.size is None else [row.size]
        near = [f"pipeline = {p}" for p, m in tried if row.legal(p, m)]
    others = [name for name, r in SCHEDULES.items() if r.chunks == row.chunks and r.legal(s.pipeline, number)]
    near += [f"schedule = {name}" for name in dict.fromkeys((*others[:2], "one_f_one_b"))]
    equation = f"micro-batches = global_batch {batch} / (data {s.data} x micro_batch {s.micro_batch})"
    return Breach(message, "schedule", tuple(near), ((equation, "train.global_batch"),))


def _stage_sum(spec: Spec, s: Choices) -> Breach | None:
    layers, stages, number = spec.model.layer_count, s.stages, s.pipeline * s.chunks
    if not stages or (sum(stages) == layers and len(stages) == number):
        return None
    wrong = f"hold {sum(stages)} layers, the model has {layers}"
    if len(stages) != number:
        wrong = f"are {len(stages)}, but pipeline = {s.pipeline}"
        wrong += f" x chunks {s.chunks} = {number}" if s.chunks > 1 else ""
    near = (f"stages = {list(even_stages(layers, number))}",) if 0 < number <= layers else ()
    return Breach(f"the stages {list(stages)} {wrong}", "stages", near, ((f"{layers} layers", "model.layers"),))


def _empty_stage(spec: Spec, s: Choices) -> Breach | None:
    last, listed = len(s.stages) - 1, spec.parallel.stages.value == s.stages
    for index, layers in enumerate(s.stages):
        at_end = listed and last and index in (0, last)
        if layers < 0 or (layers == 0 and not at_end):
            table = ", ".join(f"stage {i}: {n}" for i, n in enumerate(s.stages))
            layout = even_stages(spec.model.layer_count, len(s.stages))
            near = (f"stages = {list(layout)}",) if min(layout) > 0 else (f"pipeline = {spec.model.layer_count}",)
            message = f"stage {index} of {len(s.stages)} would hold {layers} layers ({table})"
            return Breach(message, "stages", near)
    return None


def _shard(spec: Spec, s: Choices) -> Breach | None:
    if not s.shard or s.data % s.shard == 0:
        return None
    near = tuple(f"shard = {d}" for d in around(divisors(s.data), s.shard))
    message = f"shard = {s.shard} does not divide data = {s.data}: every group of ranks that share shards is as large"
    return Breach(message, "shard", near)


def _reduced(spec: Spec, s: Choices) -> Breach | None:
    if s.zero != 2 or s.reduce != "once":
        return None
    message = "zero = 2 keeps a shard of the gradients only, reduce = once keeps them whole: that is zero = 1"
    return Breach(message, "reduce", ("reduce = each", "zero = 1"))


def _host(spec: Spec, s: Choices) -> Breach | None:
    cluster = spec.cluster
    if s.offload == "none" or cluster.host_bytes:
        return None
    missing = [key for key in ("host_memory", "host_link") if not getattr(cluster, key)]
    message = f"offload = {s.offload} needs memory of the host, the cluster states no {' and no '.join(missing)}"
    facts = ((f"{cluster.devices_per_node} devices share the memory of a node", "cluster"),)
    return Breach(
        message, "offload", ("offload = none", *(f"cluster with {{ {key} = ... }}" for key in missing)), facts
    )


def _late_state(spec: Spec, s: Choices) -> Breach | None:
    if not s.late_check or s.offload not in ("optimizer", "both"):
        return None
    message = f"late_check keeps the state before each step on the device, offload = {s.offload} moves it to the host"
    near = "none" if s.offload == "optimizer" else "activations"
    return Breach(message, "offload", ("late_check = false", f"offload = {near}"))


def _separator(spec: Spec, s: Choices) -> Breach | None:
    separator, attention = spec.train.separator, spec.model.attention
    if separator is None:
        return None
    if separator >= spec.model.vocab:
        message = f"separator = {separator} is no token of a vocabulary of {spec.model.vocab}"
        return Breach(message, "train.separator", (f"separator = {spec.model.vocab - 1}", "separator = none"))
    if attention is not None and attention.kind == "mla":
        message = "latent attention knows no documents: it would see across the separator"
        return Breach(message, "train.separator", ("separator = none",))
    return None


def _available(spec: Spec, s: Choices) -> Breach | None:
    for key in ("region", "zero", "schedule", "recompute", "offload", "context_form"):
        value, now = getattr(s, key), CHOICES[key].now
        if value not in now and not (key == "schedule" and schedule_row(value).size):
            reason = CHOICES[key].reason(value) or "unknown"
            return Breach(f"{key} = {value} is not available in this version: {reason}", key, tuple(map(str, now)))
    return None


RULES: tuple[Rule, ...] = (
    Rule("T241", "every degree is at least 1", ("region", *AXES, "micro_batch"), _positive),
    Rule("T240", "the degrees multiply to the world size", ("region", *AXES), _world),
    Rule("T203", "tensor divides the attention heads", ("tensor",), _heads),
    Rule("T242", "tensor divides kv_heads or is a multiple of it", ("tensor",), _kv_heads),
    Rule("T243", "tensor divides the feed-forward width", ("tensor",), _ffn),
    Rule("T258", "documents can be told apart", (), _separator),
    Rule("T234", "the sequence fits the positions of the model", (), _positions),
    Rule(
        "T244",
        "a sequence has a token for each of its pieces; with experts they divide it",
        ("context", "tensor", "sequence_parallel", "context_form", "context_heads", "context_order"),
        pieces,
    ),
    Rule("T245", "head exchange splits whole heads", ("context", "tensor", "context_form"), head_exchange),
    Rule(
        "T245",
        "context_heads divides context, and splits whole heads",
        ("context", "tensor", "context_form", "context_heads"),
        ring_heads,
    ),
    Rule("T245", "latent attention has no ring", ("context", "context_form"), latent_ring),
    Rule(
        "T257",
        "ranks share out whole experts",
        ("expert", "expert_tensor", "tensor", "data", "context", "sequence_parallel", "zero", "shard"),
        experts,
    ),
    Rule("T257", "expert divides the experts", ("expert",), whole_experts, partial=True),
    Rule(
        "T257",
        "ranks that share experts are taken from data x context x tensor",
        ("expert", "data", "context", "tensor"),
        among_ranks,
        partial=True,
    ),
    Rule(
        "T257",
        "tensor ranks share experts where the sequence is sharded",
        ("expert", "expert_tensor", "tensor", "sequence_parallel"),
        shared_by_tensor,
        partial=True,
    ),
    Rule("T257", "tensor ranks share experts, or the width of each", ("expert_tensor", "tensor"), expert_tensor),
    Rule("T246", "data x micro_batch divides the global batch", ("data", "micro_batch"), _batch),
    Rule("T246", "data divides the global batch", ("data",), _batch_over_data, partial=True),
    Rule("T246", "micro_batch divides the global batch", ("micro_batch",), _batch_of_micro, partial=True),
    Rule("T249", "there are no more stages than layers", ("pipeline",), _pipeline),
    Rule("T252", "a schedule has its number of chunks per rank", ("pipeline", "schedule", "chunks"), _chunks),
    Rule("T249", "there are no more chunks than layers", ("pipeline", "chunks"), _chunk_layers),
    Rule("T253", "a schedule has its micro-batch counts", ("pipeline", "data", "micro_batch", "schedule"), _counts),
    Rule("T247", "the stages hold every layer once", ("pipeline", "stages", "chunks"), _stage_sum),
    Rule("T248", "no stage is empty, unless listed at an end", ("pipeline", "stages"), _empty_stage),
    Rule("T255", "shard divides data", ("data", "shard"), _shard),
    Rule("T256", "gradients are reduced after each micro-batch where they are sharded", ("zero", "reduce"), _reduced),
    Rule("T259", "offload has host memory to go to", ("offload",), _host),
    Rule("T259", "state is kept where it lives", ("offload", "late_check"), _late_state),
    Rule(
        "T224",
        "only what this version builds",
        ("region", "zero", "schedule", "recompute", "offload", "context_form"),
        _available,
    ),
)


def rules_about(keys: set[str]) -> Iterator[Rule]:
    """The rules that can be decided from these choices alone."""
    return (rule for rule in RULES if set(rule.needs) <= keys)


def rules_reading(*keys: str) -> tuple[Rule, ...]:
    """The rules that a change of these choices can break."""
    return tuple(rule for rule in RULES if not set(rule.needs).isdisjoint(keys))


def check_pins(spec: Spec) -> tuple[Diagnostic, ...]:
    """Errors and warnings that the user's fixed wishes alone decide (`titan check`)."""
    from titan.compiler.spec import pins

    return pins.check_pins(spec)
