"""What a memory limit forces on every plan of a mesh: recompute, or fewer micro-batches under way.

A layer that holds a bytes of a micro-batch from its forward on is rebuilt in at least r(a) seconds, by the tiers and
any mixture of them. One stage ends a forward with all of its n layers, so a is at most room / n. With p stages a layer
waits for the forwards and backwards of all later ones: n layers whose forward and backward to inputs take y hold
a n^2 y / 2 byte-seconds for each of m micro-batches, which all stages together must have room for within a step:
T >= m a n^2 y / (2 p room). What a link of b bytes/s takes to the host meanwhile, b T for one stage, b n y / 2 on the
way of a layer through p, is so much more room.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import inf
from typing import NamedTuple

from titan.compiler.cost.layer import LayerCost

HALVINGS = 24


class Tier(NamedTuple):
    """Bytes that a layer stores of a micro-batch, and seconds of its rebuild."""

    stored: float
    seconds: float


def tiers_of(layer: LayerCost, names: tuple[str, ...]) -> tuple[Tier, ...]:
    """Tiers of which mixtures are worth having, the largest first. Rebuilds count without communication."""
    near = sum((layer.traffic[0], layer.ring[0]))
    found: list[Tier] = []
    for name in ("none", "selective", "full"):
        if name in names or "adaptive" in names:
            found.append(Tier(layer.stored(name), max(layer.rebuilt(name) - near, 0.0)))
    found = [t for t in found if not any(o.stored <= t.stored and o.seconds < t.seconds for o in found)]
    if len(found) == 3 and _between(found[0], found[2], found[1].stored) <= found[1].seconds:
        del found[1]
    return tuple(sorted(found, reverse=True))


def _between(large: Tier, small: Tier, stored: float) -> float:
    if large.stored == small.stored:
        return small.seconds
    return large.seconds + (small.seconds - large.seconds) * (large.stored - stored) / (large.stored - small.stored)


def rebuild(tiers: tuple[Tier, ...], stored: float) -> float:
    """Least seconds of a layer's rebuild where it may store so many bytes; infinite where no tier stores so little."""
    if stored >= tiers[0].stored:
        return tiers[0].seconds
    for large, small in pairwise(tiers):
        if stored >= small.stored:
            return _between(large, small, stored)
    return inf


def forced(
    tiers: tuple[Tier, ...],
    room: float,
    link: float,
    layers: int,
    stages: int,
    micro_batches: int,
    seconds: float,
    layer: float,
) -> float:
    """Seconds of rebuilds, or their like, that are added to a step of `seconds` where every stage has `room` bytes for
    activations and sends `link` bytes/s to the host; `layer`: seconds of a layer's forward and backward to inputs.
    Infinite where nothing fits."""
    share = micro_batches * layers / stages
    if room <= 0.0:
        return inf
    if stages == 1:
        needed = (layers * tiers[-1].stored - room) * micro_batches  # bytes to the host, with the thriftiest tier
        if needed > 0.0 and not link:
            return inf
        least = max(seconds, needed / link) if link else seconds
        most = least + share * tiers[-1].seconds
        return (
            _crossing(
                least, most, lambda t: seconds + share * rebuild(tiers, (room + link * t / micro_batches) / layers)
            )
            - seconds
        )
    room += link * layers * layer / 2
    held = micro_batches * layers**2 * layer / (2 * stages * room)  # seconds of a step for each byte that a layer holds
    least = max(seconds + share * tiers[0].seconds, held * tiers[-1].stored)
    most = max(seconds + share * tiers[-1].seconds, least)
    return _crossing(least, most, lambda t: seconds + share * rebuild(tiers, t / held)) - seconds


def _crossing(low: float, high: float, falling: Callable[[float], float]) -> float:
    """The least t between `low` and `high` that is at least `falling(t)`, from below."""
    if falling(low) <= low:
        return low
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if falling(middle) <= middle else (middle, high)
    return low
