"""Steps ahead of their check end where exact ones do, to the bit; what must not have happened is taken back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from titan.compiler.lower import lower
from titan.compiler.plan.program import Plan, Role
from titan.compiler.schedules.order import Element, Order, Pair
from titan.compiler.schedules.registry import SCHEDULES
from titan.compiler.schedules.timetable import Durations, timetable
from titan.compiler.strategy import Strategy
from titan.compiler.verify.proofs import verify
from titan.runtime.ahead import Ahead, Settled
from titan.runtime.data import SyntheticSource
from titan.runtime.interpreter import Executable, StepReport
from titan.runtime.loopback import run_step
from titan.runtime.optimizer import Training
from titan.runtime.state import State, allocate
from titan.runtime.transport.loopback import Loopback

from tests.compiler.schedules.small import small_spec
from tests.runtime.small_runs import go, make_plan

SMALL = {"one_f_one_b": (1, 1), "zero_bubble_v": (1, 1, 1, 1), "dualpipe": (1, 1)}


def plan_of(schedule: str = "zero_bubble_v", clip: float | None = None, late: bool = True, **choices: Any) -> Plan:
    data = choices.get("data", 1)
    stages = SMALL[schedule]
    spec = small_spec(layers=sum(stages), batch=4 * data, devices=2 * data, tied=True, dropout=0.1, precision="fp32")
    spec = replace(spec, train=spec.train.model_copy(update={"clip": clip}))
    strategy = Strategy(pipeline=2, micro_batches=4, schedule=schedule, stages=stages, late_check=late, **choices)
    return lower(spec, strategy)


def poisoned(
    plan: Plan, rank: int, state: State, steps: tuple[int, ...], order: str, step: list[int]
) -> Callable[[int], None]:
    """Makes a gradient of this stage infinite before the norm of some steps, whichever order runs them; `step` holds
    the step that the order is at."""
    program = list(plan.role_of(rank).instructions(order))
    at = next((n for n, (*_, i) in enumerate(program) if i.opcode == "grad_norm"), -1)

    def before(position: int) -> None:
        if position == at and step[0] in steps:
            name = next(n for n in state.buffers if n.startswith("g."))
            state.buffers[name][0] = float("inf")

    return before


class Watched(Executable):
    """An executable that says which step it is at."""

    at: list[int]

    def run(self, step: int) -> Any:
        self.at[0] = step
        return (yield from super().run(step))


def trained(
    plan: Plan, steps: int, poison: tuple[int, ...] = (), exact: bool = False
) -> tuple[list[State], list[list[StepReport]], list[Ahead | Executable]]:
    """All ranks on loopback; the last step is settled. Reports are those that became certain."""
    world, size = Loopback("cpu"), plan.mesh.world_size
    states = [allocate(plan, rank, torch.device("cpu")) for rank in range(size)]
    source, programs = SyntheticSource(32, seed=3), []
    for rank in range(size):

        def make(order: str, rank: int = rank) -> Executable:
            chosen, step = poison if rank == size - 1 else (), [-1]
            delay = poisoned(plan, rank, states[rank], chosen, order, step)
            found = Watched(plan, rank, world.transport(rank), states[rank], source, order, delay=delay)
            found.at = step
            return found

        programs.append(make("train") if exact else Ahead(make, Training.of(plan)))
    reports: list[list[StepReport]] = []
    for step in range(steps):
        found = run_step(programs, step)  # type: ignore[arg-type]
        if exact:
            reports.append(list(found))
    if not exact:
        run_step([Settled(p) for p in programs], steps)  # type: ignore[misc]
        reports = [list(ranks) for ranks in zip(*(p.take() for p in programs), strict=True)]  # type: ignore[union-attr]
    assert world.unmatched() == []
    return states, reports, programs


def same(left: list[State], right: list[State]) -> bool:
    kinds = ("p.", "o.", "g.")
    return all(
        a.updates == b.updates
        and all(torch.equal(a.buffers[n], b.buffers[n]) for n in a.buffers if n.startswith(kinds))
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize(
    ("schedule", "choices"),
    [
        ("zero_bubble_v", {}),
        ("one_f_one_b", {"data": 2, "zero": 1}),
        ("dualpipe", {"zero": 1}),
        ("one_f_one_b", {"data": 2, "zero": 2}),
    ],
)
@pytest.mark.parametrize("clip", [None, 0.3, 1e9])
def test_the_same_bits_as_exact_steps(schedule: str, choices: dict[str, Any], clip: float | None) -> None:
    """Without clipping, with clipping now and then, with a clip that is never reached."""
    plan = plan_of(schedule, clip, **choices)
    assert {key: p.findings for key, p in verify(plan).items() if not p.ok} == {}
    states, reports, _ = trained(plan, 5)
    exact, wanted, _ = trained(plan, 5, exact=True)
    assert same(states, exact)
    assert [[r.grad_norm for r in ranks] for ranks in reports] == [[r.grad_norm for r in ranks] for ranks in wanted]
    assert [max((r.loss or 0.0) for r in ranks) for ranks in reports] == [
        max((r.loss or 0.0) for r in ranks) for ranks in wanted
    ]


def test_an_infinite_gradient_on_one_stage_leaves_no_trace() -> None:
    """The step that met it is as if it had never been taken, on every stage."""
    plan = plan_of(clip=None)
    before, _, _ = trained(plan, 2)
    after, reports, _ = trained(plan, 3, poison=(2,))
    assert same(before, after)
    assert [r.skipped for r in reports[2]] == [True] * 2 and all(s.updates == 2 for s in after)
    on, _, _ = trained(plan, 5, poison=(2,))
    exact, _, _ = trained(plan, 5, poison=(2,), exact=True)
    assert same(on, exact)


def test_a_step_that_was_taken_ahead_is_taken_back() -> None:
    """The norm of step 2 is looked at after the backwards of step 3: until then its update stands."""
    plan = plan_of(clip=None)
    _, _, programs = trained(plan, 4)
    assert all(isinstance(p, Ahead) and p._sure for p in programs)
    states, reports, _ = trained(plan, 4, poison=(2,))
    assert [r.step for ranks in reports for r in ranks[:1]] == [0, 1, 2, 3]
    assert states[0].updates == 3


def test_nothing_waits_between_steps() -> None:
    """Steps one after the other without a joint end: idle time of the flush once, not once a step."""
    for name in ("zero_bubble_v", "zero_bubble_h2"):
        ranks, m, steps, row = 4, 8, 3, SCHEDULES[name]
        one = row.order(ranks, m)
        units = Durations.unit(len(one.placement), 1.0 / row.chunks)
        items = [tuple(_later(i, m * s) for s in range(steps) for i in items) for items in one.ranks]
        joined = Order(one.placement, tuple(items))
        flush = timetable(one, units).makespan - 3 * m
        assert timetable(joined, units).makespan == pytest.approx(3 * m * steps + flush)


def _later(item: Element | Pair, number: int) -> Element | Pair:
    assert isinstance(item, Element)
    return Element(item.phase, item.chunk, item.micro_batch + number)


def _without(plan: Plan, order: str, word: str) -> Plan:
    """The plan with one block call of an order left out."""

    def cut(role: Role) -> Role:
        calls = dict(role.orders)
        gone = next(n for n, call in enumerate(calls[order]) if call.block.startswith(word))
        calls[order] = (*calls[order][:gone], *calls[order][gone + 1 :])
        return replace(role, orders=tuple(calls.items()))

    return replace(plan, roles=(cut(plan.roles[0]), *plan.roles[1:]))


@pytest.mark.parametrize(
    ("order", "word"), [("undo", "undo.l0"), ("update", "ahead.l0"), ("body", "F."), ("check", "norm")]
)
def test_a_missing_piece_is_found(order: str, word: str) -> None:
    found = verify(_without(plan_of(), order, word))
    assert not all(proof.ok for proof in found.values())


def test_an_exact_plan_keeps_nothing() -> None:
    late, exact = plan_of(), plan_of(late=False)
    assert [name for name, _ in exact.roles[0].orders] == ["train", "evaluate"]
    extra = {b.name: b.bytes for b in late.roles[0].buffers if b.kind == "kept"}
    assert extra and not [b for b in exact.roles[0].buffers if b.kind == "kept"]
    assert sum(extra.values()) == sum(3 * 4 * b.elements for b in late.buckets if 0 in b.homes)


def test_a_run_of_two_processes_ends_as_an_exact_one(tmp_path: Path) -> None:
    """Losses, the held-out loss between steps and what is saved."""
    results = []
    for name, wish in (("exact", "late_check = false"), ("late", "late_check = true")):
        folder = tmp_path / name
        folder.mkdir()
        plan = make_plan(folder, f"pipeline = 2\n    micro_batch = 2\n    schedule = zero_bubble_h1\n    {wish}")
        assert ("body" in dict(plan.roles[0].orders)) == (name == "late")
        outcome = go(plan, folder)
        assert outcome.code == 0 and outcome.result is not None
        results.append({key: outcome.result[key] for key in ("steps", "first_loss", "final_loss", "validation_loss")})
    assert results[0] == results[1]


def test_one_stage_takes_its_steps_ahead_too() -> None:
    """No loss is sent to other stages: all of the check that changes anything is done before the next step begins."""
    spec = small_spec(layers=2, batch=8, devices=2, tied=True, dropout=0.1, precision="fp32")
    strategy = Strategy(data=2, micro_batches=4, stages=(2,), zero=1)
    late = lower(spec, replace(strategy, late_check=True))
    assert {key: p.findings for key, p in verify(late).items() if not p.ok} == {}
    states, reports, _ = trained(late, 3)
    exact, wanted, _ = trained(lower(spec, strategy), 3, exact=True)
    assert same(states, exact)
    assert [[r.loss for r in ranks] for ranks in reports] == [[r.loss for r in ranks] for ranks in wanted]
