"""Placements against an enumeration of every group; collective times against what their algorithms must move."""

from __future__ import annotations

import json
from itertools import product
from math import prod

import pytest
from titan.compiler.cost.machine import read_machine
from titan.compiler.cost.network import Placement, bases, collective_seconds, place, transfer_seconds
from titan.compiler.cost.prices import Prices
from titan.compiler.plan.mesh import Group, Mesh
from titan.compiler.plan.program import Plan, Role

CLUSTER = {
    "name": "test",
    "nodes": 64,
    "devices_per_node": 8,
    "device": {"name": "d", "memory": 80 * 2**30, "peak": {"bf16": 1e15, "fp32": 1e14}, "memory_bandwidth": 3e12},
    "intra": {"bandwidth": 4e11, "latency": 3e-6},
    "inter": {"bandwidth": 5e10, "latency": 8e-6},
    "efficiency": {"intra": 1.0, "inter": {"value": 1.0, "source": "test"}},
}
MACHINE = read_machine(CLUSTER)


@pytest.mark.parametrize("per_node", [1, 2, 6, 8])
@pytest.mark.parametrize("distance", [1, 2, 3, 5, 7, 8, 12])
def test_long_strides_are_placed_as_if_every_member_were_counted(distance: int, per_node: int) -> None:
    """A stride of members is placed by a few of its periods."""
    for number in range(1, 61):
        for base in range(per_node):
            nodes = [(base + distance * member) // per_node for member in range(number)]
            fewest = min(map(nodes.count, nodes)) if distance % per_node else 1
            touched = len(set(nodes)) if distance % per_node else number
            assert place(((distance, number),), frozenset({base}), per_node) == Placement(number, touched, fewest)


def groups_by_enumeration(sizes: tuple[int, ...], inside: set[int]) -> list[list[int]]:
    """All groups of a mesh whose members differ in the coordinates `inside`, ranks in mesh order."""
    strides = [prod(sizes[k + 1 :]) for k in range(len(sizes))]
    found = []
    for fixed in product(*(range(1) if k in inside else range(n) for k, n in enumerate(sizes))):
        base = sum(c * s for c, s in zip(fixed, strides, strict=True))
        found.append(
            [
                base + sum(c * strides[k] for c, k in zip(moved, sorted(inside), strict=True))
                for moved in product(*(range(sizes[k]) for k in sorted(inside)))
            ]
        )
    return found


@pytest.mark.parametrize("sizes", [(4, 2, 2, 2), (2, 3, 1, 4), (1, 8, 2, 3), (2, 2, 5, 2), (3, 4, 2, 6), (2, 1, 12, 1)])
@pytest.mark.parametrize("inside", [{3}, {2}, {1}, {1, 2}, {2, 3}, {1, 3}])
@pytest.mark.parametrize("per_node", [4, 8])
def test_placement_is_the_worst_group(sizes: tuple[int, ...], inside: set[int], per_node: int) -> None:
    strides = [prod(sizes[k + 1 :]) for k in range(4)]
    chosen = tuple((strides[k], sizes[k]) for k in sorted(inside))
    others = tuple((strides[k], sizes[k]) for k in range(4) if k not in inside)
    found = place(chosen, bases(0, others, per_node), per_node)
    worst = []
    for members in groups_by_enumeration(sizes, inside):
        nodes = [rank // per_node for rank in members]
        worst.append((len(set(nodes)), -min(nodes.count(n) for n in set(nodes))))
    assert (found.size, (found.nodes, -found.local)) == (len(members), max(worst))


def test_prices_place_groups_like_the_plan_does() -> None:
    mesh = Mesh((("pipeline", 4), ("data", 3), ("context", 2), ("tensor", 4)))
    roles = tuple(Role(p, ((),), (), (), ()) for p in range(4))
    groups = (Group("all", "pipeline*data*context*tensor"), Group("tied", "pipeline", (0, 3)))
    plan = Plan(1, (("cluster", json.dumps(CLUSTER)),), mesh, groups, (), (), (), (), roles)
    prices = Prices(plan)
    for name in ("tensor", "data", "context", "data*context", "tied", "all"):
        for role in roles:
            first = mesh.rank({"pipeline": role.pipeline, "data": 0, "context": 0, "tensor": 0})
            ranks = [r for r in range(first, first + 24) if r in plan.group_members(r, name)]
            worst = (0, 0)
            for rank in ranks:
                nodes = [m // 8 for m in plan.group_members(rank, name)]
                worst = max(worst, (len(set(nodes)), -min(nodes.count(n) for n in set(nodes))))
            found = prices.placement(role, name)
            assert found.size == plan.group_size(name)
            if ranks:
                assert (found.nodes, -found.local) == worst, (name, role.pipeline)


def test_ring_inside_a_node_moves_its_volume() -> None:
    whole = 1e9
    gather = collective_seconds(MACHINE, "all_gather", Placement(8, 1, 8), whole)
    assert gather == pytest.approx(whole * 7 / 8 / 4e11 + 7 * 3e-6)
    assert collective_seconds(MACHINE, "reduce_scatter", Placement(8, 1, 8), whole) == gather
    assert collective_seconds(MACHINE, "all_reduce", Placement(8, 1, 8), whole) == pytest.approx(2 * gather)


def test_one_member_has_nothing_to_send() -> None:
    for opcode in ("all_gather", "all_reduce", "all_to_all", "broadcast"):
        assert collective_seconds(MACHINE, opcode, Placement(1, 1, 1), 1e9) == 0.0


def test_members_of_a_node_share_the_way_out() -> None:
    """Eight members per node send through eight adapters: the network part is an eighth of that with one per node."""
    alone = collective_seconds(MACHINE, "all_gather", Placement(16, 16, 1), 1e10)
    together = collective_seconds(MACHINE, "all_gather", Placement(128, 16, 8), 1e10)
    assert alone == pytest.approx(1e10 * 15 / 16 / 5e10, rel=0.01)
    assert together == pytest.approx(max(alone / 8, 1e10 * 127 / 128 / 4e11), rel=0.02)


def test_small_all_reduce_goes_by_a_tree() -> None:
    """512 nodes: a ring would pay a thousand latencies, a tree twenty."""
    small = collective_seconds(MACHINE, "all_reduce", Placement(512, 512, 1), 4.0)
    assert small < 25 * 8e-6


def test_crossing_a_node_is_slower() -> None:
    assert transfer_seconds(MACHINE, True, 1e8) == pytest.approx(8e-6 + 1e8 / 5e10)
    assert transfer_seconds(MACHINE, False, 1e8) == pytest.approx(3e-6 + 1e8 / 4e11)
    for opcode in ("all_gather", "all_reduce", "all_to_all"):
        assert collective_seconds(MACHINE, opcode, Placement(8, 8, 1), 1e8) > collective_seconds(
            MACHINE, opcode, Placement(8, 1, 8), 1e8
        )
