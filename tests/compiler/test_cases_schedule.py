"""Situations from public reports about schedules and hangs; each test bears the id of its case."""

from __future__ import annotations

from dataclasses import replace

import pytest
from titan.compiler.lower import lower
from titan.compiler.plan.program import Block, Plan
from titan.compiler.schedules.registry import SCHEDULES
from titan.compiler.schedules.timetable import Durations, timetable
from titan.compiler.search.enumeration import enumerate_space
from titan.compiler.spec.legality import check_pins, is_legal, legal
from titan.compiler.strategy import Strategy
from titan.compiler.verify.proofs import verify

from tests.compiler.schedules.small import small_spec
from tests.compiler.spec.writing import errors, only, resolved, spec_text
from tests.compiler.test_cases_plan import told


def test_S_SCH_01_interleaving_with_too_few_micro_batches_names_both_numbers_and_the_levers() -> None:
    text = spec_text("pipeline = 6, schedule = interleaved, data = 1, micro_batch = 1", devices=6, layers=24, batch="3")
    found = only(errors(text))
    assert found.code == "T253" and "micro-batches" in found.message
    assert "pipeline = 6" in found.message and "3 micro-batches" in found.message
    said = told(found)
    assert all(word in said for word in ("global_batch", "data", "micro_batch", "one_f_one_b"))
    assert "global_batch = 6 (6 micro-batches)" in found.nearest
    assert errors(text.replace("interleaved", "one_f_one_b")) == ()


@pytest.mark.parametrize("name", ["one_f_one_b", "gpipe"])
def test_S_SCH_02_one_micro_batch_on_eight_stages_is_warned_about_with_its_bubble(name: str) -> None:
    spec = resolved(spec_text(f"pipeline = 8, schedule = {name}, data = 1, micro_batch = 1", batch="1"))
    found = only(check_pins(spec))
    assert found.code == "T254" and found.severity == "warning" and "bubble_fraction = 0.875" in found.message
    order = SCHEDULES[name].order(8, 1)
    assert timetable(order, Durations.unit(8)).flush_bubble == pytest.approx(7 / 8)
    for micro_batches in range(1, 17):  # none hangs
        timetable(SCHEDULES[name].order(8, micro_batches), Durations.unit(8))


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "accepted"), [(8, 16, True), (8, 14, False), (8, 17, False), (7, 14, False)]
)
def test_S_SCH_03_dualpipe_says_which_counts_it_takes(ranks: int, micro_batches: int, accepted: bool) -> None:
    wishes = f"pipeline = {ranks}, schedule = dualpipe, data = 1, micro_batch = 1"
    text = spec_text(wishes, devices=ranks, layers=16, batch=str(micro_batches))
    spec = resolved(text)
    layout = Strategy(pipeline=ranks, schedule="dualpipe", micro_batches=micro_batches, zero=0, stages=())
    if accepted:
        assert errors(text) == () and is_legal(spec, layout) and enumerate_space(spec).families
        return
    found = only(errors(text))
    assert found.code == "T253" and "even number of ranks" in found.message and not is_legal(spec, layout)
    assert f"pipeline = {ranks}" in found.message and f"{micro_batches} micro-batches" in found.message
    near = " ".join(found.nearest)
    assert ("16" in near or "18" in near) if ranks == 8 else ("pipeline = 6" in near and "pipeline = 8" in near)


def test_S_SCH_03_parameters_are_held_twice() -> None:
    def parameters(name: str) -> int:
        spec = small_spec(layers=4, batch=8, devices=4)
        plan = lower(spec, Strategy(pipeline=4, micro_batches=8, schedule=name, stages=(1, 1, 1, 1)))
        return sum(b.bytes for role in plan.roles for b in role.buffers if b.kind in ("parameters", "gradients"))

    assert parameters("dualpipe") == 2 * parameters("one_f_one_b")


def _with(plan: Plan, stage: int, name: str, block: Block) -> Plan:
    role = plan.roles[stage]
    blocks = tuple(block if b.name == name else b for b in role.blocks)
    roles = tuple(replace(role, blocks=blocks) if r is role else r for r in plan.roles)
    return replace(plan, roles=roles)


def test_S_SCH_05_neighbours_that_both_wait_first_are_found() -> None:
    """A planted cycle: two neighbours each wait for the other's message before they send their own."""
    spec = small_spec(layers=4, batch=8, devices=4)
    plan = lower(spec, Strategy(pipeline=4, micro_batches=8, stages=(1, 1, 1, 1)))
    assert all(proof.ok for proof in verify(plan).values())
    role = plan.roles[1]
    order = list(role.order("train"))
    first = next(n for n, call in enumerate(order) if call.block.startswith("F."))
    back = next(n for n, call in enumerate(order) if call.block.startswith("B."))
    order[first], order[back] = order[back], order[first]
    changed = replace(role, orders=(("train", tuple(order)), *role.orders[1:]))
    broken = replace(plan, roles=tuple(changed if r is role else r for r in plan.roles))
    found = verify(broken)
    assert not found["progress"].ok or not found["registers"].ok
    assert any(finding.message for proof in found.values() for finding in proof.findings)


@pytest.mark.parametrize("name", SCHEDULES)
def test_S_SCH_05_every_send_meets_its_receive_in_order(name: str) -> None:
    """Messages of every pair of ranks are sent and received in one order, and the synchronous run comes to its end."""
    row = SCHEDULES[name]
    chunks = 4 * row.chunks
    spec = small_spec(layers=chunks, batch=8, devices=4)
    plan = lower(spec, Strategy(pipeline=4, micro_batches=8, schedule=name, stages=(1,) * chunks))
    found = verify(plan)
    assert found["matching"].ok and found["progress"].ok


def test_a_schedule_of_another_number_of_chunks_is_refused() -> None:
    found = only(errors(spec_text("pipeline = 2, schedule = zero_bubble_v, chunks = 3, data = 2, tensor = 2")))
    assert found.code == "T252" and "2 chunks" in found.message and "chunks = 2" in found.nearest
    shallow = only(errors(spec_text("pipeline = 8, schedule = zero_bubble_v", layers=8)))
    assert shallow.code == "T249" and "16 chunks" in shallow.message and "8 layers" in shallow.message
    spec = resolved(spec_text("pipeline = 2, data = 2, tensor = 2"))
    wrong = Strategy(pipeline=2, data=2, tensor=2, schedule="zero_bubble_v", micro_batches=32, stages=(4, 4))
    assert [d.code for d in legal(spec, wrong)] == ["T252"]
