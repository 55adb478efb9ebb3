"""Parameters into buckets: one flat padded buffer per layer and kind of gradient sum.

How a parameter is read says what its gradient needs: `R` on a factor means a sum over it, `V` a shard, `I` nothing.
Sums over data and context are the data-parallel reduction (and the ZeRO shard group); sums over tensor factors come
first (norms under sequence parallelism, replicated KV heads).

Where a backward is split and whole gradients are scattered for each micro-batch, parameters whose gradient comes with
the backward to inputs (norms, biases) have buckets of their own: else a few of their numbers would hold the whole
gradient of a layer alive until its backward to weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import replace
from math import prod

from titan.compiler.graph.model_graph import ModelGraph, Part, Value
from titan.compiler.passes.layouts import group_name
from titan.compiler.passes.zero import BETWEEN
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.mesh import Group, Mesh
from titan.compiler.plan.operators import TensorType
from titan.compiler.plan.program import Bucket, Parameter
from titan.compiler.plan.segment import Segment, bind

REPLICAS = ("data", "context")  # axes
Kinds = tuple[str, ...]  # kinds of buffers to shard


@dataclass(frozen=True, slots=True)
class _Use:
    name: str
    formal: str
    value: Value
    part: Part
    layer: int | None
    homes: tuple[int, ...]


def buckets(
    graph: ModelGraph,
    homes: dict[str, tuple[int, ...]],
    sharded: Kinds,
    initializer: tuple[str, float],
    vocab: int,
    mirrored: bool = False,
    apart: Set[str] = frozenset(),
) -> tuple[tuple[Bucket, ...], tuple[Parameter, ...]]:
    """Buckets and parameters in model order. `homes` maps each parameter to the pipeline coordinates that hold it;
    `sharded` are the kinds of buffers that are sharded over the replicas (inside one `data.replicate`); `mirrored`: the
    homes of a parameter run the same program, so that they share gradients and parameters too; `apart`: parameters that
    share buckets with each other only."""
    mesh = graph.mesh
    seen: dict[str, Value] = {}
    known: dict[object, _Made] = {}
    layers = sum(1 for _, layer in graph.chain if layer is not None)
    found: list[Bucket] = []
    parameters: list[Parameter] = []
    for uses in _uses(graph, homes):
        for use in uses:
            assert seen.get(use.name, use.value).layout == use.value.layout, f"{use.name} is read in two layouts"
        fresh = [use for use in uses if use.name not in seen]
        seen |= {use.name: use.value for use in fresh}
        if not fresh:
            continue
        alone = fresh[0].layer is not None and all(u.homes == fresh[0].homes and len(u.homes) == 1 for u in fresh)
        kind = (fresh[0].part.name, tuple((u.formal, u.name in apart) for u in fresh)) if alone else None
        made = known.get(kind) if kind else None
        if made is None:
            groups: dict[tuple[str, str, str, tuple[str, ...]], list[_Use]] = {}
            for use in fresh:
                groups.setdefault(_key(use, mesh, use.name in apart), []).append(use)
            made = _Made(
                fresh[0],
                {use.name: use.formal for use in fresh},
                [
                    _bucket(*key, group, mesh, sharded, initializer, vocab, layers, mirrored)
                    for key, group in groups.items()
                ],
            )
            known |= {kind: made} if kind else {}
        else:
            made = made.of(fresh[0])
        for bucket, members in made.buckets:
            found.append(bucket)
            parameters.extend(members)
    return tuple(found), tuple(parameters)


@dataclass(frozen=True, slots=True)
class _Made:
    """Buckets with their parameters of a part instance, by one `use` of it; `formals` of the parameters."""

    use: _Use
    formals: dict[str, str]
    buckets: list[tuple[Bucket, list[Parameter]]]

    def of(self, use: _Use) -> _Made:
        """Those of another layer that is read in the same way, at one home too."""
        prefix, found = len(f"l{self.use.layer}"), []
        for bucket, members in self.buckets:
            name = f"l{use.layer}{bucket.name[prefix:]}"
            renamed = [
                Parameter(
                    bind(self.formals[p.name], use.layer),
                    p.shape,
                    p.rows,
                    p.tensor,
                    name,
                    p.offset,
                    p.decay,
                    p.initializer,
                )
                for p in members
            ]
            found.append((replace(bucket, name=name, homes=use.homes), renamed))
        return _Made(use, self.formals, found)


def _uses(graph: ModelGraph, homes: dict[str, tuple[int, ...]]) -> Iterator[list[_Use]]:
    """Parameters of every part instance."""
    for index, layer in graph.chain:
        part = graph.parts[index]
        names = parameter_names(part, layer)
        yield [_Use(n, v.name, v, part, layer, homes[n]) for n, v in zip(names, part.parameters, strict=True)]


def parameter_names(part: Part, layer: int | None) -> list[str]:
    """Full names of the parameters of one part instance."""
    return [bind(value.name, layer) for value in part.parameters]


def early_parameters(graph: ModelGraph) -> frozenset[str]:
    """Full names of the parameters whose gradients come with a backward to inputs."""
    return frozenset(
        bind(formal, layer)
        for index, layer in graph.chain
        for step in graph.parts[index].steps
        if isinstance(step, Segment)
        for formal in step.early_parameters
    )


def _key(use: _Use, mesh: Mesh, apart: bool) -> tuple[str, str, str, tuple[str, ...]]:
    """Where it is, sums over tensor factors, tensor factors with equal gradients, factors of the replicas that share
    it out (experts)."""
    states = dict(use.value.layout)
    factors = [f for f, size in mesh.factors if size > 1 and f.split(".")[0] not in ("pipeline", "region", *REPLICAS)]
    sums = tuple(f for f in factors if states.get(f) == "R")
    equal = tuple(f for f in factors if not states.get(f, "I").startswith("V"))
    where = use.part.name if use.layer is None else f"l{use.layer}"
    if use.layer is None and len(use.homes) > 1:
        where += ".tied"  # apart from what only one of the stages holds
    shared = tuple(
        f for f, s in use.value.layout if s.startswith("V") and f.split(".")[0] in REPLICAS and mesh.size(f) > 1
    )
    if use.value.dims[0] == "experts":
        where += ".experts"
    if apart:
        where += ".early"
    return where, group_name(mesh, sums), group_name(mesh, equal), shared


def _bucket(
    where: str,
    sums: str,
    equal: str,
    cut: tuple[str, ...],
    uses: list[_Use],
    mesh: Mesh,
    sharded: Kinds,
    initializer: tuple[str, float],
    vocab: int,
    layers: int,
    mirrored: bool,
) -> tuple[Bucket, list[Parameter]]:
    name = ".".join(word for word in (where, equal, "sum" if sums else "") if word)
    axes = tuple(f for f, size in mesh.factors if size > 1 and f.split(".")[0] in REPLICAS and f not in cut)
    replicas, shards = group_name(mesh, axes), group_name(mesh, tuple(f for f in axes if f != BETWEEN))
    ordered = sorted(uses, key=lambda use: len(use.value.shape) < 2)  # decayed parameters first: one range each
    parameters, offset = [], 0
    for use in ordered:
        local = use.value.local(mesh)
        kept = tuple((f, s) for f, s in local.layout if s.startswith("V"))
        rows = vocab if use.value.dims[0] == "vocab" else use.value.shape[0]
        parameters.append(
            Parameter(
                use.name,
                use.value.shape,
                rows,
                TensorType(local.dtype, local.shape, kept),
                name,
                offset,
                len(use.value.shape) > 1,
                _initializer(use, initializer, layers),
            )
        )
        offset += local.elements
    homes = uses[0].homes
    if sharded and len(homes) > 1 and (mirrored or sharded == ("o",) or not shards):
        sharded = sharded if mirrored else ("o",)  # homes with other programs can only meet at the end of a step
        shards = copies_group(homes, cut)
    sharded = sharded if shards else ()
    degree = _degree(shards, homes, mesh, cut) if sharded else 1
    elements = -(-offset // degree) * degree
    copies = group_name(mesh, tuple(f for f in axes if not sharded or f == BETWEEN))
    uncounted = "*".join(g for g in (copies, equal) if g)
    dtype, summed = uses[0].value.dtype, (sums,) if sums else ()
    held = shards if sharded else ""
    return Bucket(name, elements, dtype, summed, replicas, held, sharded, uncounted, homes), parameters


def homes_group(homes: tuple[int, ...]) -> str:
    """Name of the declared group of the pipeline ranks that hold copies of the same weights."""
    return f"homes.{'-'.join(map(str, homes))}"


def copies_group(homes: tuple[int, ...], cut: tuple[str, ...] = ()) -> str:
    """Name of the declared group of all ranks that hold copies: those homes, and their replicas in one
    `data.replicate`; `cut` are the factors that share experts out, on which there are no copies."""
    return f"copies.{'-'.join(map(str, homes))}" + (".experts" if cut else "")


def shared_by_copies(bucket: Bucket) -> bool:
    """Whether the shards lie on all ranks that hold copies, over stages too."""
    return bucket.shards.startswith("copies.")


def home_groups(bucket: Bucket, mesh: Mesh) -> tuple[Group, ...]:
    """The groups over the homes of a bucket, to be declared in the plan."""
    if len(bucket.homes) == 1:
        return ()
    found = Group(homes_group(bucket.homes), "pipeline", bucket.homes)
    if not shared_by_copies(bucket):
        return (found,)
    inner = _inside(mesh, _cut(bucket, mesh))
    return (Group(bucket.shards, "*".join(("pipeline", *inner)), bucket.homes),)


def shard_degree(bucket: Bucket, mesh: Mesh) -> int:
    """Ranks that share the sharded buffers of a bucket."""
    return _degree(bucket.shards, bucket.homes, mesh, _cut(bucket, mesh)) if bucket.sharded else 1


def _degree(shards: str, homes: tuple[int, ...], mesh: Mesh, cut: tuple[str, ...]) -> int:
    if not shards.startswith("copies."):
        return mesh.size(shards)
    return prod(mesh.size(f) for f in _inside(mesh, cut)) * len(homes)


def _inside(mesh: Mesh, cut: tuple[str, ...]) -> tuple[str, ...]:
    """Factors of the replicas in one `data.replicate`, without those that share experts out."""
    return tuple(f for f, _ in mesh.factors if f.split(".")[0] in REPLICAS and f != BETWEEN and f not in cut)


def _cut(bucket: Bucket, mesh: Mesh) -> tuple[str, ...]:
    """Factors of data and context on which the bucket has no replicas."""
    if not bucket.shards.endswith(".experts"):
        return ()
    kept = mesh.resolve(bucket.replicas) if bucket.replicas else ()
    return tuple(f for f, size in mesh.factors if size > 1 and f.split(".")[0] in REPLICAS and f not in kept)


def _initializer(use: _Use, initializer: tuple[str, float], layers: int) -> str:
    kind, std = initializer
    if len(use.value.shape) < 2:
        return "zeros" if use.formal.endswith(".bias") else "ones"
    if kind != "normal":
        return kind
    if use.formal.endswith((".out.weight", ".down.weight")):  # branches into the residual stream (GPT-2)
        std /= (2 * layers) ** 0.5
    return f"normal:{std!r}"
