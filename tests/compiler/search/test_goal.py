"""Objectives and limits, against searching every part of the cluster by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from titan.compiler.cost.predict import predict
from titan.compiler.report.summary import plan_json
from titan.compiler.report.trade_offs import trade_offs_json
from titan.compiler.search.goal import EQUAL, best, within
from titan.compiler.search.search import search
from titan.compiler.search.trade_offs import trade_offs
from titan.compiler.search.why_not import why_not
from titan.compiler.spec.devices import parts
from titan.compiler.spec.legality import check_pins
from titan.compiler.spec.schema import Objective, Spec
from titan.grammar.diagnostics import TitanError

from tests.compiler.search.specs import write
from tests.compiler.test_cli import titan

JOB = "total_tokens = 1G tokens"


def alone(spec: Spec, devices: int) -> float:
    """Step seconds of the fastest plan on so many devices of one node."""
    cluster = spec.cluster.model_copy(update={"nodes": 1, "devices_per_node": devices})
    return search(replace(spec, cluster=cluster, objective=Objective())).timeline.seconds


def test_the_least_cost_per_token_may_leave_devices_idle(tmp_path: Path) -> None:
    spec = write(tmp_path, goal="cost", price=3.0, train=JOB, batch=16)
    found = best(spec)
    hours = {devices: devices * alone(spec, devices) for devices in (1, 2, 4, 8)}
    assert found.devices * found.seconds <= EQUAL * min(hours.values()) * (1 + 1e-9)
    assert found.devices < 8  # 16 sequences of a small model: communication costs more than it saves
    warning = found.spec.warnings[-1]
    assert warning.code == "T308" and f"{found.devices} of 8" in warning.message and "idle" in warning.message
    shown = plan_json(found.spec, found.result, {})
    assert shown["world_size"] == found.devices == found.result.plan.mesh.world_size
    assert any("T308" in text for text in shown["warnings"])
    by_hand = 3.0 * found.devices * found.seconds / 3600 / (16 * 2048)
    assert shown["predicted"]["cost_per_million_tokens"] == pytest.approx(1e6 * by_hand)
    assert shown["predicted"]["tokens_per_money"] == pytest.approx(1 / by_hand)
    assert shown["job"]["cost"] == pytest.approx(by_hand * shown["job"]["tokens"])


def test_limits_of_step_time_and_devices(tmp_path: Path) -> None:
    spec = write(tmp_path, goal="cost", price=3.0, train=JOB, batch=16)
    times = {devices: alone(spec, devices) for devices in (2, 4, 8)}
    limit = (times[8] + times[4]) / 2
    hurried = best(write(tmp_path, goal="cost", price=3.0, train=JOB, batch=16, limits=f"step_time <= {limit:.6f} s"))
    assert hurried.devices == 8 and hurried.seconds <= limit
    few = best(write(tmp_path, batch=16, limits="devices <= 4"))
    assert few.devices == 4 and few.seconds == pytest.approx(times[4], rel=1e-6)
    assert few.spec.warnings[-1].code == "T308" and "devices <= 4" in few.spec.warnings[-1].message


def test_a_budget_of_the_job(tmp_path: Path) -> None:
    """The fastest plan whose job is not dearer: with room for the dearest it is the fastest of all."""
    spec = write(tmp_path, price=3.0, train=JOB, batch=16)
    fastest = best(spec)
    whole = predict(fastest.result.plan, fastest.result.timeline, fastest.result.ledger).job
    assert whole is not None and whole.cost is not None and fastest.devices == 8
    cheaper = best(write(tmp_path, price=3.0, train=JOB, batch=16, limits=f"cost <= {0.95 * whole.cost:.4f} USD"))
    job = predict(cheaper.result.plan, cheaper.result.timeline, cheaper.result.ledger).job
    assert job is not None and job.cost is not None and job.cost <= 0.95 * whole.cost
    assert cheaper.devices < 8 and cheaper.seconds > fastest.seconds


@pytest.mark.parametrize(
    ("goal", "limit", "code"),
    [("step_time", "step_time <= 1 us", "step_time"), ("cost", "cost <= 0.0001 USD", "cost")],
)
def test_a_limit_that_nothing_keeps_names_both_numbers(tmp_path: Path, goal: str, limit: str, code: str) -> None:
    with pytest.raises(TitanError, match="T307") as caught:
        best(write(tmp_path, goal=goal, price=3.0, train=JOB, batch=16, limits=limit))
    assert caught.value.exit_code == 3
    found = caught.value.diagnostics[0]
    assert f"no plan keeps {code}" in found.message and found.nearest[0].startswith(f"{code} <= ")


def test_the_least_memory_is_that_below_which_nothing_is_found(tmp_path: Path) -> None:
    wishes = "schedule = one_f_one_b; context = 1; micro_batch <= 2"
    spec = write(tmp_path, wishes, goal="memory", devices=2, batch=16)
    found = best(spec)
    fast = search(spec)
    assert found.memory < fast.ledger.peak and found.result.ledger.verdict == "fits"
    assert found.result.ledger.limit == fast.ledger.limit  # the user's, not the one that was tried
    for share in (0.98, 0.95, 0.9):
        assert within(spec, round(share * found.result.ledger.upper)) is None
    limit = (fast.timeline.seconds + found.seconds) / 2
    hurried = best(write(tmp_path, wishes, goal="memory", devices=2, batch=16, limits=f"step_time <= {limit} s"))
    assert hurried.seconds <= limit and found.memory <= hurried.memory < fast.ledger.peak


def test_pins_may_use_a_part_of_the_cluster_only_where_the_objective_says_so(tmp_path: Path) -> None:
    wishes = "tensor = 2; pipeline = 1; data = 2; context = 1"
    assert [d.code for d in check_pins(write(tmp_path, wishes))] == ["T240"]
    spec = write(tmp_path, wishes, limits="devices <= 8")
    assert check_pins(spec) == () and best(spec).devices == 4


def test_parts_are_whole_nodes_or_parts_of_one(tmp_path: Path) -> None:
    whole = write(tmp_path, nodes=12)
    assert parts(whole) == (whole,)
    few = write(tmp_path, nodes=12, limits="devices <= 50")
    assert [p.cluster.world_size for p in parts(few)] == [48, 32, 24, 16, 8, 4, 2, 1]


def test_no_trade_off_is_worse_than_another(tmp_path: Path) -> None:
    spec = write(tmp_path, "schedule = one_f_one_b", devices=2, batch=16, price=2.0)
    found = trade_offs(spec)
    assert {choice.devices for choice in found} == {1, 2}
    for one in found:
        for other in found:
            better = (other.devices < one.devices, other.seconds < one.seconds, other.memory < one.memory)
            assert one is other or not all(better)
    fastest = search(spec)
    assert min(choice.seconds for choice in found) == pytest.approx(fastest.timeline.seconds)
    rows = json.loads(json.dumps(trade_offs_json(found), allow_nan=False))["plans"]
    for row in rows:
        by_hand = 2.0 * row["devices"] * row["step_time_s"] / 3600 / (16 * 2048) * 1e6
        assert row["cost_per_million_tokens"] == pytest.approx(by_hand)


def test_the_table_is_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "schedule = one_f_one_b; tensor = 1; context = 1", devices=2, batch=8)
    path = str(tmp_path / "spec.titan")
    code, out, _ = titan(capsys, "plan", path, "--pareto")
    assert code == 0 and "device-hours per M tokens" in out and "none is better" in out
    code, out, _ = titan(capsys, "plan", path, "--pareto", "--json")
    assert code == 0 and len(json.loads(out)["plans"]) >= 2
    assert titan(capsys, "plan", path, "--pareto", "-o", str(tmp_path / "some.plan"))[0] == 2


def test_why_not_keeps_the_objective(tmp_path: Path) -> None:
    spec = write(tmp_path, goal="cost", price=3.0, train=JOB, batch=16)
    other = why_not(spec, "tensor=4")
    assert other.result is not None and other.result.plan.mesh.world_size == 4
