"""Seconds of communication: latency and bytes over bandwidth, by where the members of a group lie.

Ranks are numbered in mesh order and fill nodes one after another, so the node of a rank is `rank // devices_per_node`.
A group with `local` members on each of `nodes` nodes moves data on both levels at once: every member sends through its
own adapter, so a node's share of a ring crosses the network `local` times as fast as one adapter would.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from math import ceil, gcd, log2, prod
from typing import NamedTuple

from titan.compiler.cost.machine import Machine

Stride = tuple[int, int]  # (distance between neighbours in ranks, number of members)


class Placement(NamedTuple):
    """Where a group lies: its size, the nodes it touches, and the fewest members on one of these nodes."""

    size: int
    nodes: int
    local: int


def place(strides: tuple[Stride, ...], bases: frozenset[int], devices_per_node: int) -> Placement:
    """The worst placement of the groups that start at a rank with a residue in `bases` (modulo the node's size).

    `strides` describes the members: every sum of `c * distance` with `c < number`. Factors whose distance is a multiple
    of the node's size multiply the nodes and change nothing else.
    """
    far, near = 1, []
    for distance, number in strides:
        if distance % devices_per_node == 0:
            far *= number
        else:
            near.append((distance, number))
    size, more = far * prod(number for _, number in near), 0
    if len(near) == 1:
        near[0], more = _shortened(*near[0], devices_per_node)
    offsets = [0]
    for distance, number in near:
        offsets = [o + c * distance for o in offsets for c in range(number)]
    worst: Placement | None = None
    for base in sorted(bases):
        counts = Counter([(base + offset) // devices_per_node for offset in offsets])
        found = Placement(size, far * (len(counts) + more), min(counts.values()))
        if worst is None or (found.nodes, -found.local) > (worst.nodes, -worst.local):
            worst = found
    assert worst is not None  # there is at least one base
    return worst


def _shortened(distance: int, number: int, devices_per_node: int) -> tuple[Stride, int]:
    """As few members of a stride as fill nodes in all the ways that it does, and the nodes that the others touch: after
    some members the next one stands at the same place of a later node, and between the first and the last of such
    periods all are alike."""
    period = devices_per_node // gcd(distance, devices_per_node)
    left_out = max(number // period - 3, 0) * period
    return (distance, number - left_out), left_out * min(distance, devices_per_node) // devices_per_node


def bases(first: int, strides: tuple[Stride, ...], devices_per_node: int) -> frozenset[int]:
    """Residues, modulo the node's size, of the ranks that groups can start at; `strides`: the factors outside them."""
    found = {first % devices_per_node}
    for distance, number in strides:
        steps = range(min(number, devices_per_node))
        found = {(base + c * distance) % devices_per_node for base in found for c in steps}
    return frozenset(found)


@lru_cache(maxsize=4096)
def strided(stride: int, number: int, devices_per_node: int) -> Placement:
    """Placement of groups of `number` ranks that stand `stride` apart."""
    outside = ((1, stride), (stride * number, devices_per_node))
    return place(((stride, number),), bases(0, outside, devices_per_node), devices_per_node)


def collective_seconds(machine: Machine, opcode: str, placement: Placement, whole: float) -> float:
    """Seconds of a collective whose whole (gathered, or reduced) tensor has `whole` bytes.

    Ring: each member moves (n-1)/n of the whole, twice for all-reduce. All-reduces may go by a tree instead: the
    whole tensor up and down, with a logarithmic number of messages.
    """
    n, nodes = placement.size, placement.nodes
    if n == 1:
        return 0.0
    if nodes == 1 and machine.curves and (measured := _measured_seconds(machine, opcode, n, whole)) is not None:
        return measured
    rounds = 2 if opcode == "all_reduce" else 1
    if opcode == "all_to_all":
        return _exchange_seconds(machine, placement, whole)
    ring = rounds * (_ring_bytes_seconds(machine, placement, whole) + _ring_latency(machine, placement))
    if opcode != "all_reduce":
        return ring
    near, between = ceil(log2(max(n // nodes, 1))), ceil(log2(nodes))
    way_out = placement.local * machine.inter.bandwidth if nodes > 1 else machine.intra.bandwidth
    moved = whole / min(machine.intra.bandwidth if n > nodes else way_out, way_out)
    return min(ring, 2 * (near * machine.intra.latency + between * machine.inter.latency + moved))


def _measured_seconds(machine: Machine, opcode: str, size: int, whole: float) -> float | None:
    """By the curve of the group's size; of a size that was not measured by the nearest one, bytes and messages in
    proportion to what each member sends."""
    if (curve := machine.curves.get(f"{opcode}_{size}")) is not None:
        return curve(whole)
    known = [n for n in range(2, 2 * size) if f"{opcode}_{n}" in machine.curves]
    if not known:
        return None
    near = min(known, key=lambda n: abs(n - size))
    return machine.curves[f"{opcode}_{near}"](whole) * (size - 1) / (near - 1)


def _ring_bytes_seconds(machine: Machine, placement: Placement, whole: float) -> float:
    n, nodes, local = placement.size, placement.nodes, placement.local
    near = whole * (n - 1) / n / machine.intra.bandwidth if n > nodes else 0.0
    between = whole * (nodes - 1) / nodes / (local * machine.inter.bandwidth) if nodes > 1 else 0.0
    return max(near, between)


def _ring_latency(machine: Machine, placement: Placement) -> float:
    """A message goes round the ring: from member to member inside the nodes, and from node to node."""
    nodes = placement.nodes
    return (placement.size - nodes) * machine.intra.latency + (nodes - 1) * machine.inter.latency


def _exchange_seconds(machine: Machine, placement: Placement, whole: float) -> float:
    """All-to-all of a local tensor of `whole` bytes: each peer receives an equal part; both levels run at once."""
    n, local = placement.size, placement.local
    part = whole / n
    near = part * (local - 1) / machine.intra.bandwidth + (local - 1) * machine.intra.latency
    if placement.nodes == 1:
        return near
    return max(near, part * (n - local) / machine.inter.bandwidth + (placement.nodes - 1) * machine.inter.latency)


def transfer_seconds(machine: Machine, crosses_nodes: bool, moved: float, senders: int | None = None) -> float:
    """One point-to-point message, while `senders` devices of its node send one (by default all of them)."""
    if not crosses_nodes:
        curve = machine.curves.get("send")
        return curve(moved) if curve is not None else machine.intra.latency + moved / machine.intra.bandwidth
    adapters = machine.figures["adapters"]
    share = min(1.0, adapters * machine.devices_per_node / (senders or machine.devices_per_node)) / min(1.0, adapters)
    return machine.inter.latency + moved / (machine.inter.bandwidth * share)
