"""Steps and rounds of micro-batches that are left out: what they add, against walks of all of them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from titan.compiler.cost.simulate import simulate
from titan.compiler.cost.steady import Rest, Standing, move
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.program import BEGUN, Block, BlockCall, Plan, Role
from titan.compiler.plan.rounds import Rounds, own_rounds, rounds

from tests.compiler.cost.test_simulate import FixedPrices, issue, naive_times, pipeline_plan, wait


def late_role(role: Role, lasting: int) -> Role:
    """A role whose norm is begun at the end of a step and waited for after the next body, as is a gather; `lasting`
    gathers of a step are waited for nowhere, and may take longer than the step."""
    begun = Block("norm" + BEGUN, (), (Instruction("grad_norm", ("n",), ()), issue("all_reduce", "nsq?", "all", "all")))
    gathers = [issue("all_gather", f"p{k}?", "slow") for k in range(lasting)]
    after = Block("end", (), (Instruction("optimizer_step", (), ()), *gathers, issue("all_gather", "p?", "ahead")))
    used = Block("used", (), (wait("p?"),))
    begins = Block("first", (), (issue("all_gather", "first?", "ahead"), wait("first?")))
    known = Block("norm.known", (), (wait("nsq?"),))
    body = tuple(call for call in role.order("train") if call.block != "end")
    orders = (
        ("body", (BlockCall("first"), *body)),
        ("check", (BlockCall("norm" + BEGUN), BlockCall("used"), BlockCall("norm.known"))),
        ("update", (BlockCall("end"),)),
    )
    blocks = tuple(b for b in role.blocks if b.name != "end")
    return replace(role, blocks=(*blocks, begins, begun, after, used, known), orders=orders)


def steps_of(plan: Plan, steps: int) -> Plan:
    """So many steps one after another as one order."""

    def role(r: Role) -> Role:
        body, check, update = (r.order(name) for name in ("body", "check", "update"))
        further = (*body, *check[1:], check[0], *update)
        return replace(r, orders=(("train", (*body, check[0], *update, *further * (steps - 1))),))

    return replace(plan, roles=tuple(map(role, plan.roles)))


def late_plan(seed: int) -> Plan:
    chance = random.Random(seed)
    roles, micro_batches = chance.randrange(1, 5), chance.randrange(1, 7)
    plan = pipeline_plan(roles, micro_batches, [chance.randrange(1, 4) for _ in range(roles)])
    return late(plan, chance)


def late(plan: Plan, chance: random.Random) -> Plan:
    return replace(plan, roles=tuple(late_role(role, chance.choice((0, 0, 40))) for role in plan.roles))


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """What is said of every second step: by how much it has moved everything."""
    found: list[int | None] = []
    since = Standing.since

    def noted(self: Standing, before: Standing) -> int | None:
        found.append(since(self, before))
        return found[-1]

    monkeypatch.setattr(Standing, "since", noted)
    return found


def test_a_further_step_adds_what_a_walk_of_all_says(moves: list[int | None]) -> None:
    for seed in range(60):
        plan, prices = late_plan(seed), FixedPrices(seed)
        three, two = (naive_times(steps_of(plan, steps), prices) for steps in (3, 2))
        assert simulate(plan, prices=prices).step == three - two
    known = [moved for moved in moves if moved is not None]
    assert 0 < len(known) < len(moves)


def test_a_step_left_out_is_equal_to_one_walked(moves: list[int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [(late_plan(seed), FixedPrices(seed, slowdown=1.07)) for seed in range(60)]
    short = [simulate(plan, prices=prices) for plan, prices in plans]
    assert sum(moved is not None for moved in moves) > 10
    monkeypatch.setattr(Standing, "since", lambda self, before: None)
    assert short == [simulate(plan, prices=prices) for plan, prices in plans]


def test_one_time_that_moves_otherwise_is_enough() -> None:
    before = Standing({(0,): 5, (1,): 7}, {("bubble",): 3})
    after = Standing({(0,): 15, (1,): 17}, {("bubble",): 3})
    assert after.since(before) == 10
    assert replace(after, times={(0,): 15, (1,): 18}).since(before) is None
    assert replace(after, times={(0,): 15}).since(before) is None
    assert replace(after, fixed={("bubble",): 4}).since(before) is None


@pytest.fixture
def left_out(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rounds were left out."""
    found: list[int] = []

    def noted(*given: Any) -> None:
        found.append(given[-1])
        move(*given)

    monkeypatch.setattr("titan.compiler.cost.simulate.move", noted)
    return found


def many_rounds(seed: int) -> tuple[Plan, FixedPrices]:
    chance = random.Random(seed)
    roles, micro_batches = chance.randrange(1, 6), chance.randrange(8, 60)
    layers = [chance.randrange(1, 4) for _ in range(roles)]
    return pipeline_plan(roles, micro_batches, layers), FixedPrices(seed, chance.choice((1.0, 1.07)))


def test_rounds_left_out_are_equal_to_rounds_walked(left_out: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [many_rounds(seed) for seed in range(60)]
    plans += [(late(plan, random.Random(seed)), prices) for seed, (plan, prices) in enumerate(plans)]
    short = [simulate(plan, prices=prices) for plan, prices in plans]
    assert len(left_out) > 20 and min(left_out) > 0
    monkeypatch.setattr("titan.compiler.cost.simulate.rounds", lambda roles: None)
    assert short == [simulate(plan, prices=prices) for plan, prices in plans]


def patient(role: Role) -> Role:
    """A role that waits for what it sends back after its last micro-batch, so that nobody holds up a round."""
    sent, calls = wait("t.d:i?"), role.order("train")
    blocks = tuple(replace(b, instructions=tuple(i for i in b.instructions if i != sent)) for b in role.blocks)
    last = tuple(BlockCall("sent", call.arguments) for call in calls if call.block == "B" and role.pipeline)
    orders = (("train", (*calls[:-1], *last, calls[-1])),)
    return replace(role, blocks=(*blocks, Block("sent", ("i",), (sent,))), orders=orders)


def test_the_rest_of_a_body_left_out_is_equal_to_one_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    for seed in range(60):
        plan, prices = many_rounds(seed)
        patience = replace(plan, roles=tuple(map(patient, plan.roles)))
        plans.append((late(patience, random.Random(seed)), prices))
    again, left_out = Rest.again, list[bool]()

    def noted(self: Rest, *given: Any) -> bool:
        left_out.append(again(self, *given))
        return left_out[-1]

    monkeypatch.setattr(Rest, "again", noted)
    short = [simulate(plan, prices=prices) for plan, prices in plans]
    assert 20 < sum(left_out) < len(left_out)
    monkeypatch.setattr(Rest, "again", lambda *given: False)
    assert short == [simulate(plan, prices=prices) for plan, prices in plans]


def test_a_step_of_rounds_left_out_is_the_naive_walk(left_out: list[int]) -> None:
    for seed in range(12):
        plan, prices = many_rounds(seed)
        prices = FixedPrices(seed)
        assert simulate(plan, prices=prices).step == naive_times(plan, prices)
    assert left_out


def test_rounds_of_roles_come_to_one_micro_batch() -> None:
    """1F1B on three ranks: each round is a forward and a backward; the last rank starts the rounds at once, the first
    after its forwards."""
    found = rounds(own_rounds(role.order("train")) for role in pipeline_plan(3, 20, [1, 1, 1]).roles)
    assert found == Rounds(first=(2, 3, 4), length=(2, 2, 2), times=18)


def test_a_call_out_of_turn_ends_the_rounds() -> None:
    orders = [list(role.order("train")) for role in pipeline_plan(3, 40, [1, 1, 1]).roles]
    whole = rounds(map(own_rounds, orders))
    orders[1].insert(50, BlockCall("F", (99,)))
    shorter = rounds(map(own_rounds, orders))
    assert whole is not None and shorter is not None and shorter.times < whole.times
    orders[1][10:70:2] = [BlockCall("X")] * 30
    assert rounds(map(own_rounds, orders)) is None
