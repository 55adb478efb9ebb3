"""Parts of a cluster that a plan may use where the objective allows idle devices: whole nodes, or a part of one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from titan.compiler.spec.degrees import AXES
from titan.compiler.spec.divisors import divisors
from titan.compiler.spec.schema import Spec


def parts(spec: Spec) -> tuple[Spec, ...]:
    """The spec on each part of its cluster that is worth a look, largest first; only the whole where all devices must
    be used. Numbers of nodes are those that divide well: divisors of the cluster's and of the limit's, powers of two,
    and what the pinned degrees multiply to."""
    cluster, most = spec.cluster, spec.objective.devices or spec.cluster.world_size
    if not spec.objective.fewer:
        return (spec,)
    sizes = {size for size in _sizes(spec, most) if size <= min(most, cluster.world_size)}
    return tuple(_on(spec, size) for size in sorted(sizes, reverse=True))


def ladder(spec: Spec) -> tuple[Spec, ...]:
    """The same for any objective."""
    return parts(replace(spec, objective=spec.objective.model_copy(update={"devices": _limit(spec)})))


def _limit(spec: Spec) -> int:
    return min(spec.objective.devices or spec.cluster.world_size, spec.cluster.world_size)


def _sizes(spec: Spec, most: int) -> Iterator[int]:
    """Numbers of devices: parts of one node, and whole nodes."""
    inside, nodes = spec.cluster.devices_per_node, spec.cluster.nodes
    yield from divisors(inside)
    room = min(most // inside, nodes)
    for number in (nodes, room):
        yield from (inside * d for d in divisors(number))
    yield from (inside << k for k in range(room.bit_length()))
    pinned = prod(wish.value for axis in AXES if (wish := getattr(spec.parallel, axis)).fixed)
    if pinned % inside == 0 or inside % pinned == 0:
        yield pinned


def _on(spec: Spec, size: int) -> Spec:
    """The spec on `size` devices: so many nodes, or one node with fewer devices."""
    inside = spec.cluster.devices_per_node
    change = {"nodes": size // inside} if size >= inside else {"nodes": 1, "devices_per_node": size}
    return replace(spec, cluster=spec.cluster.model_copy(update=change))
