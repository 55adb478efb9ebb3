"""Order + graph -> Plan: stages, buckets, blocks, programs; every instruction of every rank."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import asdict, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from titan.compiler.graph.build import COMPUTE_DTYPE, build
from titan.compiler.graph.model_graph import Convert, ModelGraph
from titan.compiler.passes.ahead import Orders, ahead, kept
from titan.compiler.passes.blocks import BlockWriter, Chunk, Names
from titan.compiler.passes.buckets import buckets, early_parameters, home_groups, parameter_names, shard_degree
from titan.compiler.passes.draft import Draft
from titan.compiler.passes.interleave import interleave
from titan.compiler.passes.layouts import group_name
from titan.compiler.passes.offload import offload
from titan.compiler.passes.registry import run
from titan.compiler.passes.repeat import Irregular, Shorter, shorter
from titan.compiler.passes.transfers import transfer_blocks, transfers
from titan.compiler.passes.twins import Closing, Kind, Model, kind, phases_of
from titan.compiler.passes.update import begin, counted, end, epilogue
from titan.compiler.passes.window import sends_outstanding
from titan.compiler.passes.zero import Choices, Sharding
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.layout import dual
from titan.compiler.plan.mesh import Group, Mesh
from titan.compiler.plan.operators import TensorType, statistics_dtype
from titan.compiler.plan.program import Block, BlockCall, Bucket, Buffer, Parameter, Plan, Role, called
from titan.compiler.plan.segment import Segment
from titan.compiler.schedules.order import Order, forward_only
from titan.compiler.strategy import Strategy

if TYPE_CHECKING:
    from titan.compiler.spec.schema import Spec

PLAN_VERSION = 1
T = TypeVar("T")


def lower(spec: Spec, strategy: Strategy, ranks: Collection[int] | None = None) -> Plan:
    """The plan of a legal strategy (`compiler/spec/legality.py`); deterministic. `ranks`: programs of these pipeline
    ranks only, for who measures them."""
    model = spec.model
    mesh = strategy.mesh(model.attention.kv_heads if model.attention else strategy.tensor)
    graph = run(build(spec, strategy, mesh), strategy)
    statistic = statistics_dtype(COMPUTE_DTYPE[spec.train.precision])
    whole = _written(spec, graph, strategy)
    few = shorter(graph, strategy)
    source = _written(spec, few.graph, few.strategy) if few else whole
    numbers = [rank for rank in range(strategy.pipeline) if ranks is None or rank in ranks]
    try:
        roles = _roles(numbers, whole, source, few, statistic)
    except Irregular:  # every layer is lowered
        roles = _roles(numbers, whole, whole, None, statistic)
    segments = tuple(step for part in graph.parts for step in part.steps if isinstance(step, Segment))
    return Plan(
        PLAN_VERSION,
        _settings(spec, strategy),
        mesh,
        _groups(whole.buckets, strategy.order, mesh),
        _types(graph, sum(strategy.stages), statistic),
        whole.buckets,
        whole.parameters,
        segments,
        roles,
    )


@dataclass(frozen=True)
class _Written:
    """What the programs of all ranks share: where layers and parameters are, and who writes their blocks."""

    strategy: Strategy
    mesh: Mesh
    chunks: tuple[Chunk, ...]
    buckets: tuple[Bucket, ...]
    parameters: tuple[Parameter, ...]
    writer: BlockWriter

    @cached_property
    def held(self) -> dict[int, tuple[Chunk, ...]]:
        """Chunks of each rank."""
        placement = self.strategy.order.placement
        return _grouped((placement[chunk.number], chunk) for chunk in self.chunks)

    @cached_property
    def at(self) -> dict[int, tuple[Bucket, ...]]:
        """Buckets of each rank."""
        return _grouped((rank, bucket) for bucket in self.buckets for rank in bucket.homes)


def _grouped(pairs: Iterable[tuple[int, T]]) -> dict[int, tuple[T, ...]]:
    found: dict[int, list[T]] = {}
    for rank, item in pairs:
        found.setdefault(rank, []).append(item)
    return {rank: tuple(items) for rank, items in found.items()}


def _written(spec: Spec, graph: ModelGraph, strategy: Strategy) -> _Written:
    model, order = spec.model, strategy.order
    chunks = _chunks(graph, strategy.stages, order)
    homes = _homes(graph, chunks, order.placement)
    initializer = (model.initializer, model.init_std)
    apart = early_parameters(graph) if "g" in strategy.sharded and order.splits else frozenset()
    found, parameters = buckets(graph, homes, strategy.sharded, initializer, model.vocab, order.mirrored, apart)
    writer = BlockWriter(graph, {p.name: p.bucket for p in parameters}, sum(strategy.stages), strategy)
    return _Written(strategy, graph.mesh, chunks, found, parameters, writer)


def with_settings(spec: Spec, plan: Plan, strategy: Strategy) -> Plan:
    """A plan as another memory limit or other reasons for the same choices would have made it."""
    return plan.with_settings(_settings(spec, strategy))


def _chunks(graph: ModelGraph, stages: tuple[int, ...], order: Order) -> tuple[Chunk, ...]:
    """The chunks of every copy; `stages` holds the layers of the chunks of one copy in model order."""
    layers = [link for link in graph.chain if link[1] is not None]
    embed, head = graph.chain[0], graph.chain[-1]
    found, held = [], order.placement
    for number in range(len(held)):
        stage = number % order.chunks_per_copy
        first, count = sum(stages[:stage]), stages[stage]
        chain = tuple(layers[first : first + count])
        chain = (embed, *chain) if order.first(number) else chain
        chain = (*chain, head) if order.last(number) else chain
        before = None if order.first(number) else held[number - 1] - held[number]
        after = None if order.last(number) else held[number + 1] - held[number]
        found.append(Chunk(number, chain, first, first + count, before, after))
    return tuple(found)


def _homes(graph: ModelGraph, chunks: tuple[Chunk, ...], placement: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Pipeline coordinates that hold each parameter."""
    found: dict[str, dict[int, None]] = {}
    for chunk in chunks:
        for index, layer in chunk.chain:
            for name in parameter_names(graph.parts[index], layer):
                found.setdefault(name, {})[placement[chunk.number]] = None
    return {name: tuple(sorted(ranks)) for name, ranks in found.items()}


Calls = tuple[BlockCall, ...]


def _roles(
    ranks: list[int], whole: _Written, source: _Written, few: Shorter | None, statistic: str
) -> tuple[Role, ...]:
    """`source`: where the blocks of micro-batches are written, which may be a model with fewer alike layers."""
    firsts: dict[Kind, int] = {}
    models: dict[int, Model] = {}
    closings: dict[int, Closing] = {}
    found = []
    for rank in ranks:
        computing = _computing(rank, source, firsts, models)
        blocks = tuple(map(few.longer, computing.blocks)) if few else computing.blocks
        closing = _closing(rank, whole, None if few else computing.first, closings)
        found.append(_role(rank, whole, replace(computing, blocks=blocks), closing, statistic))
    return tuple(found)


def _role(rank: int, whole: _Written, computing: _Computing, closing: Closing, statistic: str) -> Role:
    strategy, order, mesh, held = whole.strategy, whole.strategy.order, whole.mesh, closing.chunks
    mine = whole.at[rank]
    holds_loss = any(order.last(c.number) for c in held)
    opened = (begin(_data_group(mesh)), counted()) if holds_loss else ()
    opening, closed = ((BlockCall("begin"),), (BlockCall("counted"),)) if holds_loss else ((), ())
    body = (*opening, *computing.body, *closed)
    train = (*body, *closing.calls, BlockCall("end"))
    evaluate = (*opening, *computing.forwards, *closed, BlockCall("end"))
    buffers = tuple(b for bucket in mine for b in _buffers(bucket, mesh, statistic, strategy.state_on_host))
    if holds_loss:
        buffers = (*buffers, Buffer("b.loss", "metric", statistic, 1))
    layers = tuple(tuple(layer for _, layer in c.chain if layer is not None) for c in held)
    orders: Orders = (("train", train), ("evaluate", evaluate))
    if strategy.late_check:
        first = next(n for n, call in enumerate(closing.calls) if call.block == "norm")
        orders = (*orders, ("body", (*body, *closing.calls[:first])), *closing.orders)
        degrees = {b.name: shard_degree(b, mesh) for b in mine}
        buffers = (*buffers, *(kept(bucket, statistic, degrees[bucket.name]) for bucket in mine))
    return Role(rank, layers, buffers, (*opened, *computing.blocks, *closing.blocks), orders)


def _data_group(mesh: Mesh) -> str:
    return group_name(mesh, tuple(f for f in ("data", "context") if mesh.size(f) > 1))


def _closing(rank: int, whole: _Written, first: int | None, known: dict[int, Closing]) -> Closing:
    """What a rank does behind its micro-batches; `first` of its kind, `known`: of the first rank of every kind."""
    strategy, order, mesh, held = whole.strategy, whole.strategy.order, whole.mesh, whole.held[rank]
    if first in known:
        return known[first].renamed(held)
    mine = whole.at[rank]
    blocks, calls = epilogue(mine, mesh, strategy.state_on_host, strategy.prefetch)
    ends = tuple(order.placement[c.number] for c in whole.chunks if order.last(c.number))
    last = end(_data_group(mesh), ends, mesh.size("pipeline"), rank)
    found = Closing(held, (*blocks, last), calls, ())
    if strategy.late_check:
        more, orders = ahead(mine, calls, next(b for b in blocks if b.name == "norm"), last)
        found = replace(found, blocks=(*found.blocks, *more), orders=orders)
    if first is not None:
        known[first] = found
    return found


@dataclass(frozen=True)
class _Computing:
    """A rank's blocks of micro-batches, and their calls in a training step and in an evaluation. `first`: the first
    rank of its kind."""

    first: int | None
    blocks: tuple[Block, ...]
    body: Calls
    forwards: Calls


def _computing(rank: int, written: _Written, firsts: dict[Kind, int], models: dict[int, Model]) -> _Computing:
    """`firsts`, `models`: the first rank of every kind."""
    strategy, order = written.strategy, written.strategy.order
    held, mine = written.held[rank], written.at[rank]
    window = sends_outstanding(strategy)
    body = transfers(order, window)[rank]
    forwards = transfers(forward_only(order, strategy.micro_batches), window, "E")[rank]
    halves = frozenset(half for name in set(called(body)) for half in name.split("+"))
    own, choices = kind(held, halves, mine, written.writer), Choices(strategy.gather == "once", strategy.prefetch)
    first = firsts.setdefault(own, rank) if own else None
    model = None if first is None else models.get(first)
    if model is None:
        between = tuple(block for chunk in held for block in transfer_blocks(chunk, training=True))
        away = offload(_drafts(held, halves, written.writer), held, strategy)
        sharding = Sharding(away.drafts, mine, choices)
        if first is not None:
            models[first] = Model(held, between, away, sharding)
    else:
        between, away = model.of(held)
        sharding = Sharding(away.drafts, mine, choices, model.sharding)
    body = away.order(body)
    body, forwards = sharding.order(body), sharding.order(forwards)
    blocks = [*between, *away.blocks, *sharding.finished()]
    return _Computing(first, (*blocks, *(_pairs(blocks, body) if order.paired else ())), body, forwards)


def _drafts(held: tuple[Chunk, ...], halves: frozenset[str], writer: BlockWriter) -> list[Draft]:
    found: list[Draft] = []
    for chunk in held:
        found += writer.training(chunk, phases_of(chunk, halves))
        found.append(writer.evaluate(chunk))
    return found


def _pairs(blocks: list[Block], body: tuple[BlockCall, ...]) -> list[Block]:
    """The interleaved block of every kind of pair that the order calls."""
    table = {block.name: block for block in blocks}
    names = dict.fromkeys(name for name in called(body) if "+" in name)
    return [interleave(*(table[half] for half in name.split("+"))) for name in names]


def _buffers(bucket: Bucket, mesh: Mesh, statistic: str, on_host: bool) -> tuple[Buffer, ...]:
    """Parameters, gradients and optimizer state, which may live on the host."""
    degree = shard_degree(bucket, mesh)
    state, place = bucket.state_copies * bucket.local("o", degree), "host" if on_host else "device"
    return (
        Buffer(f"p.{bucket.name}", "parameters", bucket.dtype, bucket.local("p", degree)),
        Buffer(f"g.{bucket.name}", "gradients", statistic, bucket.local("g", degree)),
        Buffer(f"o.{bucket.name}", "optimizer", statistic, state, place),
    )


def _groups(found: tuple[Bucket, ...], order: Order, mesh: Mesh) -> tuple[Group, ...]:
    """Groups that hold ranks of several programs: all, the homes of copied weights, the stages that hold a loss."""
    if mesh.world_size == 1:
        return ()
    groups = {"all": Group("all", "region*pipeline*data*context*tensor")}
    for bucket in found:
        groups |= {group.name: group for group in home_groups(bucket, mesh)}
    ends = tuple(sorted(rank for chunk, rank in enumerate(order.placement) if order.last(chunk)))
    if len(ends) > 1:
        groups["ends"] = Group("ends", "pipeline*data*context", ends)
    return tuple(groups.values())


def _types(graph: ModelGraph, layers: int, statistic: str) -> tuple[tuple[str, TensorType], ...]:
    """Types of all registers by type name, forward values and gradients (whose layout is the dual)."""
    from titan.compiler.plan.instruction import type_name

    found: dict[str, TensorType] = {}
    for part in graph.parts:
        names = Names(part, 0 if part.repeated else None, layers)
        crossing = {v for step in part.steps if isinstance(step, Segment) for v in (*step.inputs, *step.outputs)}
        readers = Counter(v for step in part.steps if isinstance(step, Segment) for v in step.inputs)
        crossing |= {v for step in part.steps if isinstance(step, Convert) for v in (step.result, step.source)}
        for value in part.values:
            if value.name in crossing and value.kind != "parameter":
                local = value.local(graph.mesh)
                found[type_name(names.register(value.name))] = local
                if value.kind == "activation":
                    dtype = statistics_dtype(local.dtype) if value.wide else local.dtype
                    gradient = TensorType(dtype, local.shape, dual(local.layout))
                    for number in range(max(3, readers[value.name] + 1)):
                        found[type_name(names.gradient(value.name, number))] = gradient
    scalar = TensorType(statistic, ())
    found |= dict.fromkeys(("count", "count.local", "nsq", "nsq.local", "loss.sum", "loss.all"), scalar)
    return tuple(sorted(found.items()))


def _choices(strategy: Strategy) -> dict[str, Any]:
    """The strategy without the order, which the programs hold."""
    found = asdict(replace(strategy, written_order=None))
    del found["written_order"], found["wished_chunks"]
    return {**found, "chunks": strategy.chunks}


def _settings(spec: Spec, strategy: Strategy) -> tuple[tuple[str, str], ...]:
    from titan.compiler.spec.padding import padded

    train, optimizer = spec.train, spec.train.optimizer
    values: dict[str, Any] = {
        "titan": "0.1.0",
        "model": spec.model.model_dump(),
        "cluster": spec.cluster.model_dump(),
        "memory.limit_bytes": int(spec.cluster.device.memory * spec.objective.memory_fraction),
        "memory.host_bytes": spec.cluster.host_bytes,
        "strategy": _choices(strategy),
        "transfers.window": sends_outstanding(strategy),
        "train.sequence": train.sequence,
        "train.padding": padded(train.sequence, strategy) - train.sequence,
        "train.global_batch": train.global_batch,
        "train.micro_batch": strategy.micro_batch,
        "train.micro_batches": strategy.micro_batches,
        "train.precision": train.precision,
        "train.learning_rate": optimizer.learning_rate,
        "train.min_learning_rate": (
            optimizer.learning_rate / 10 if optimizer.min_learning_rate is None else optimizer.min_learning_rate
        ),
        "train.beta1": optimizer.beta1,
        "train.beta2": optimizer.beta2,
        "train.eps": optimizer.eps,
        "train.weight_decay": optimizer.weight_decay,
        "train.warmup_steps": train.warmup_steps,
        "train.steps": train.steps,
        "train.total_tokens": train.total_tokens,
        "train.schedule": train.schedule,
        "train.clip": train.clip,
        "train.seed": train.seed,
        "train.separator": train.separator,
        "train.data": train.data,
        "train.validation": train.validation and train.validation.model_dump(),
    }
    return tuple((key, json.dumps(value, sort_keys=True)) for key, value in sorted(values.items()))
