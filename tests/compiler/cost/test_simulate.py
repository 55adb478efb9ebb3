"""The simulator against a naive walk that unrolls every instruction and knows neither blocks nor memoisation."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest
from titan.compiler.cost.simulate import SimulationStalled, simulate
from titan.compiler.cost.strands import stretch
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.mesh import Group, Mesh
from titan.compiler.plan.program import Block, BlockCall, Plan, Role


class FixedPrices:
    """Random but fixed prices by opcode, unit and stream; transfers have one price per register on both sides.
    `issue`: of a price, what its rank is at work itself."""

    def __init__(self, seed: int, slowdown: float = 1.0, issue: int = 0) -> None:
        self.seed, self.issue = seed, issue
        self.machine = SimpleNamespace(figures={"overlap_slowdown": slowdown}, cores=0)

    def price(self, role: Role, i: Instruction) -> int:
        if i.opcode in ("wait", "free"):
            return 0
        low = min(role.pipeline, role.pipeline + int(i.attribute("peer", 0)))
        key = (low, i.stream) if i.row.kind == "transfer" else (i.opcode, i.unit, i.stream, i.group)
        return random.Random(f"{self.seed}{key}").randrange(5, 200)


def issue(opcode: str, name: str, stream: str, group: str = "tensor", **attributes: int) -> Instruction:
    reads, writes = (("x:i",), (name,)) if opcode != "recv" else ((), (name,))
    return Instruction(opcode, writes, reads, (), "", group, stream, tuple(attributes.items()))


def wait(name: str) -> Instruction:
    return Instruction("wait", (), (name,))


def unit(opcode: str, name: str) -> Instruction:
    return Instruction(opcode, (), (), (), name)


def forward_block(role: int, roles: int, layers: int) -> Block:
    body: list[Instruction] = []
    if role:
        body += [issue("recv", "act:i?", "act", "pipeline", peer=-1), wait("act:i?")]
    for layer in range(layers):
        body += [
            issue("all_gather", f"g{layer}:i?", "gather"),
            unit("forward", f"s0.l{layer}"),
            wait(f"g{layer}:i?"),
            unit("forward", f"s1.l{layer}"),
            issue("reduce_scatter", f"r{layer}:i?", "scatter"),
        ]
    body += [wait(f"r{layer}:i?") for layer in range(layers)]
    if role < roles - 1:
        body.append(issue("send", "t.out:i?", "act", "pipeline", peer=1))
    return Block("F", ("i",), tuple(body))


def backward_block(role: int, roles: int, layers: int) -> Block:
    body: list[Instruction] = []
    if role < roles - 1:
        body += [wait("t.out:i?"), issue("recv", "d.out:i?", "grad", "pipeline", peer=1), wait("d.out:i?")]
    for layer in reversed(range(layers)):
        body += [issue("all_gather", f"h{layer}:i?", "gather"), unit("backward", f"s1.l{layer}"), wait(f"h{layer}:i?")]
        body.append(unit("backward", f"s0.l{layer}"))
    if role:
        body.append(issue("send", "t.d:i?", "grad", "pipeline", peer=-1))
        body.append(wait("t.d:i?"))
    return Block("B", ("i",), tuple(body))


def epilogue_block(layers: int) -> Block:
    body = [Instruction("reduce_grad", (f"u.l{k}?",), (), (), "", "data", "reduce") for k in range(layers)]
    body += [wait(f"u.l{k}?") for k in range(layers)]
    body += [
        Instruction("grad_norm", ("n",), ()),
        issue("all_reduce", "nsq?", "all", "all"),
        wait("nsq?"),
        Instruction("optimizer_step", (), ()),
    ]
    return Block("end", (), tuple(body))


def pipeline_plan(roles: int, micro_batches: int, layers: list[int], break_order: bool = False) -> Plan:
    programs = []
    for r in range(roles):
        warm_up = min(roles - 1 - r, micro_batches)
        calls = [BlockCall("F", (i,)) for i in range(warm_up)]
        for i in range(warm_up, micro_batches):
            calls += [BlockCall("F", (i,)), BlockCall("B", (i - warm_up,))]
        calls += [BlockCall("B", (i,)) for i in range(micro_batches - warm_up, micro_batches)]
        if break_order:  # rank 0 waits for the first backward before it sends the forward that rank 1 wants first
            calls = [BlockCall(b, (i,)) for b, i in (("F", 0), ("B", 0), ("F", 1), ("B", 1))]
            calls[1:3] = reversed(calls[1:3]) if r else calls[1:3]
        blocks = (forward_block(r, roles, layers[r]), backward_block(r, roles, layers[r]), epilogue_block(layers[r]))
        programs.append(Role(r, ((),), (), blocks, (("train", (*calls, BlockCall("end"))),)))
    mesh = Mesh((("pipeline", roles), ("data", 2), ("context", 1), ("tensor", 2)))
    settings = (("cluster", json.dumps({})),)
    return Plan(1, settings, mesh, (Group("all", "pipeline*data*tensor"),), (), (), (), (), tuple(programs))


def naive_times(plan: Plan, prices: FixedPrices) -> int:
    """Makespan by repeated passes over the unrolled lists until every start time is known."""
    lists = [[i for *_, i in role.instructions()] for role in plan.roles]
    known: list[dict[str, int]] = [{} for _ in plan.roles]  # completion of pending registers
    posted: dict[tuple[object, ...], list[list[int]]] = {}  # meeting key -> issue times of each side, in order
    finished: dict[tuple[object, ...], list[int]] = {}
    clocks = [[0, 0] for _ in plan.roles]  # program position, compute clock
    streams: list[dict[str, int]] = [{} for _ in plan.roles]
    makespan = 0
    moved = True
    while moved:
        moved = False
        for r, role in enumerate(plan.roles):
            while clocks[r][0] < len(lists[r]):
                position, clock = clocks[r]
                i = lists[r][position]
                cost = prices.price(role, i)
                if i.opcode == "wait":
                    value = known[r].get(i.reads[0])
                    if isinstance(value, tuple):
                        key, k = value
                        sides = posted[key]
                        while all(len(s) > len(finished[key]) for s in sides):
                            n = len(finished[key])
                            before = finished[key][-1] if n else 0
                            finished[key].append(max(before, *(s[n][0] for s in sides)) + max(s[n][1] for s in sides))
                        if len(finished[key]) <= k:
                            break
                        value = finished[key][k]
                    clocks[r] = [position + 1, max(clock, value)]
                    makespan = max(makespan, value)
                elif i.row.asynchronous:
                    clock, cost = clock + prices.issue, max(cost - prices.issue, 0)
                    if i.row.kind == "transfer" or i.group == "all":
                        if i.group == "all":
                            key, side, sides_number = ("all", i.stream), r, len(plan.roles)
                        else:
                            other = r + int(i.attribute("peer"))
                            pair = (r, other) if i.opcode == "send" else (other, r)
                            key, side, sides_number = (*pair, i.stream), int(i.opcode == "recv"), 2
                        sides = posted.setdefault(key, [[] for _ in range(sides_number)])
                        finished.setdefault(key, [])
                        sides[side].append((clock, cost))
                        known[r][i.writes[0]] = (key, len(sides[side]) - 1)
                    else:
                        end = max(clock, streams[r].get(i.stream, 0)) + cost
                        streams[r][i.stream] = known[r][i.writes[0]] = end
                        makespan = max(makespan, end)
                    clocks[r] = [position + 1, clock]
                else:
                    clocks[r] = [position + 1, clock + cost]
                moved = True
    return max(makespan, *(clock for _, clock in clocks))


@pytest.mark.parametrize("seed", range(20))
def test_equals_the_naive_walk(seed: int) -> None:
    chance = random.Random(seed)
    roles, micro_batches = chance.randrange(1, 6), chance.randrange(1, 9)
    plan = pipeline_plan(roles, micro_batches, [chance.randrange(1, 4) for _ in range(roles)])
    prices = FixedPrices(seed, issue=seed % 3 * 40)
    timeline = simulate(plan, prices=prices)
    assert timeline.step == naive_times(plan, prices)
    for role in timeline.roles:
        assert role.busy + role.exposed + role.bubble == timeline.step
        assert 0 <= role.span_bubble <= role.bubble


def test_uniform_stages_have_the_textbook_bubble() -> None:
    """1F1B with equal stages and free transfers: (p - 1) / (m + p - 1) of the step is bubble."""

    class Uniform(FixedPrices):
        def price(self, role: Role, i: Instruction) -> int:
            return {"forward": 100, "backward": 200}.get(i.opcode, 0)

    roles, micro_batches = 4, 12
    timeline = simulate(pipeline_plan(roles, micro_batches, [1] * roles), prices=Uniform(0))
    assert timeline.step == (micro_batches + roles - 1) * (200 + 400)
    assert timeline.bubble_fraction == pytest.approx((roles - 1) / (micro_batches + roles - 1))
    assert timeline.exposed_comm_fraction == 0


def test_a_cycle_of_waits_is_reported() -> None:
    with pytest.raises(SimulationStalled, match="wait for each other"):
        simulate(pipeline_plan(2, 2, [1, 1], break_order=True), prices=FixedPrices(1))


@pytest.mark.parametrize("cost,beside", [(100, 0), (100, 60), (100, 110), (100, 500), (7, 3)])
def test_compute_beside_communication_is_slower(cost: int, beside: int) -> None:
    """Work done at 1/slowdown while communication runs, at full speed after."""
    taken = stretch(cost, beside, 1.1)
    overlapped = min(beside, taken)
    assert overlapped / 1.1 + (taken - overlapped) == pytest.approx(cost, abs=1)
