"""Work shared by two processes: every job is done once, whoever does it, and nothing is lost with the helper."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from titan.compiler.plan.program import Plan
from titan.compiler.search.search import search
from titan.compiler.shared_work import SharedWork
from titan.compiler.verify.early import EarlyProofs
from titan.compiler.verify.findings import Finding
from titan.compiler.verify.proofs import PROOFS, verify

from tests.compiler.schedules.small import small_spec
from tests.compiler.verify import tiny


def always(result: object) -> bool:
    return True


def noted(folder: Path, name: str) -> Callable[[], str]:
    """A job that leaves a mark each time that it is done."""

    def job() -> str:
        with (folder / name).open("a") as file:
            file.write("x")
        return f"{name}!"

    return job


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan.compiler.shared_work.second_core", lambda: True)


@pytest.mark.parametrize("pays", [True, False])
@pytest.mark.parametrize("go_on", [None, always])
def test_every_job_is_done_once(go_on: Callable[[object], bool] | None, pays: bool, tmp_path: Path) -> None:
    names = [f"job{k}" for k in range(40)]
    found = SharedWork({name: noted(tmp_path, name) for name in names}, go_on, pays).finish()
    assert found == {name: f"{name}!" for name in names} and list(found) == names
    assert {name: (tmp_path / name).read_text() for name in names} == dict.fromkeys(names, "x")


@pytest.mark.parametrize("go_on", [None, always])
def test_own_jobs_are_done_here(go_on: Callable[[object], bool] | None) -> None:
    work = SharedWork({f"job{k}": os.getpid for k in range(4)}, go_on, own=("job1", "job3"))
    work._take = lambda: None  # type: ignore[method-assign]  # all others are the helper's
    found = work.finish()
    assert [pid == os.getpid() for pid in found.values()] == [False, True, False, True]


def test_nothing_follows_from_a_first_job_that_says_so(tmp_path: Path) -> None:
    jobs = {name: noted(tmp_path, name) for name in ("first", "second")}
    assert SharedWork(jobs, lambda result: result != "first!").finish() == {"first": "first!"}
    assert not (tmp_path / "second").exists()


def test_what_a_killed_helper_had_is_done_here(tmp_path: Path) -> None:
    parent = os.getpid()

    def dies() -> str:
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return "done here"

    found = SharedWork({"first": dies, "second": noted(tmp_path, "second")}, always).finish()
    assert found == {"first": "done here", "second": "second!"}


@pytest.mark.parametrize("go_on", [None, always])
def test_a_job_that_fails_is_told_here_and_only_here(
    go_on: Callable[[object], bool] | None, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails() -> str:
        raise ValueError("no")

    work = SharedWork({"first": fails, "second": str}, go_on)
    with pytest.raises(ValueError, match="no"), work:
        work.finish()
    assert capfd.readouterr() == ("", "")


def test_work_that_is_left_leaves_no_process() -> None:
    with SharedWork({"first": lambda: signal.pause()}) as work:
        helper = work._helper
        assert helper is not None and helper.is_alive()
    assert helper.exitcode == -signal.SIGTERM


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan.compiler.verify.proofs.LARGE", 0)


def found(plan: Plan) -> dict[str, tuple[bool, tuple[Finding, ...]]]:
    return {name: (proof.ok, proof.findings) for name, proof in verify(plan).items()}


def without_orders(plan: Plan) -> Plan:
    return replace(plan, roles=(replace(plan.roles[0], orders=(("train", ()),)), *plan.roles[1:]))


WHOLE = tiny.plan("pipeline")
BROKEN = without_orders(WHOLE)
UNDECLARED = replace(WHOLE, buckets=())
ALONE = [found(plan) for plan in (WHOLE, BROKEN, UNDECLARED)]


@pytest.mark.usefixtures("two_processes")
@pytest.mark.parametrize(("plan", "alone"), list(zip((WHOLE, BROKEN, UNDECLARED), ALONE, strict=True)))
def test_proofs_in_two_processes_are_those_of_one(plan: Plan, alone: dict[str, object]) -> None:
    shared = found(plan)
    assert shared == alone and list(shared) == [name for name, _ in PROOFS]


@pytest.mark.usefixtures("two_processes")
def test_early_proofs_are_kept_only_for_the_plan_that_they_read() -> None:
    strategy = {**WHOLE.setting("strategy"), "reasons": [["tensor", "search", "other words"]]}
    told = replace(WHOLE, settings=tuple({**dict(WHOLE.settings), "strategy": json.dumps(strategy)}.items()))
    limited = replace(WHOLE, settings=tuple({**dict(WHOLE.settings), "memory.limit_bytes": "1000"}.items()))
    with EarlyProofs() as early:
        early.begin(WHOLE)
        begun = early._under_way
        early.begin(told)
        assert early._under_way is begun
        assert all(proof.ok for proof in early.proofs(told).values())
        for plan, broken in ((BROKEN, "data"), (limited, "memory")):
            early.begin(WHOLE)
            assert not early.proofs(plan)[broken].ok
        early.begin(WHOLE)
    assert early._under_way is None


def test_a_search_tells_of_the_plan_that_it_finds() -> None:
    told: list[Plan] = []
    result = search(small_spec(layers=4, batch=8, devices=4), likely=told.append)
    assert replace(told[-1], settings=()) == replace(result.plan, settings=())
