"""Training by local ranks: what it gives, what it logs, going on from a save, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from titan.grammar.diagnostics import TitanError
from titan.runtime.data import SyntheticSource, open_data
from titan.runtime.launch import Options, total_steps
from titan.runtime.log import read_log
from titan.runtime.loopback import run_loopback
from titan.runtime.permutation import derive_key

from tests.runtime.small_runs import go, make_plan

torch.set_num_threads(1)


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """All ranks' saved buffers by rank and name."""
    files = sorted((folder / "checkpoints" / f"step-{step:08d}").glob("*.safetensors"))
    return {f"{path.stem} {name}": value for path in files for name, value in load_file(path).items()}


def code_of(error: pytest.ExceptionInfo[TitanError]) -> str:
    return error.value.diagnostics[0].code


@pytest.mark.parametrize("parallel", ["pipeline = 2", "tensor = 2", "data = 2, zero = 1"])
def test_processes_give_the_losses_of_loopback(parallel: str, tmp_path: Path) -> None:
    plan = make_plan(tmp_path, parallel.replace(", ", "\n    "), precision="fp64")
    outcome = go(plan, tmp_path)
    source = open_data("synthetic(64)", tmp_path, 16, int(plan.setting("train.seed")))
    expected = run_loopback(plan, 6, source)
    records = [r for r in read_log(tmp_path / "log" / "log.jsonl") if r["event"] == "step"]
    assert outcome.code == 0
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    assert [r["loss"] for r in records] == pytest.approx(expected.losses, rel=1e-12)
    assert [r["grad_norm"] for r in records] == pytest.approx(expected.norms, rel=1e-12)
    assert records[0]["learning_rate"] == pytest.approx(0.01)  # the peak, after one warm-up step


def test_result_and_log_agree(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    result = go(plan, tmp_path).result
    assert result is not None
    records = read_log(tmp_path / "log" / "log.jsonl")
    steps = [r for r in records if r["event"] == "step"]
    assert result["steps"] == 6 and result["ranks"] == 2 and not result["stopped"]
    assert result["first_loss"] == steps[0]["loss"] and result["final_loss"] == steps[-1]["loss"]
    assert result["peak_memory_bytes"] >= max(r["process_peak_bytes"] for r in steps)
    held_out = [r for r in records if r["event"] == "validation"]
    assert [r["step"] for r in held_out] == [4, 6]
    assert result["validation_loss"] == held_out[-1]["validation_loss"]


def test_validation_is_the_mean_over_held_out_batches(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, precision="fp64", steps=1)
    result = go(plan, tmp_path).result
    assert result is not None
    trained = run_loopback(plan, 1, open_data("synthetic(64)", tmp_path, 16, 1234))
    held_out = SyntheticSource(64, seed=derive_key(0, True))
    losses = run_loopback(plan, 2, held_out, order="evaluate", states=trained.states).losses
    assert result["validation_loss"] == pytest.approx(sum(losses) / 2, rel=1e-12)


@pytest.mark.parametrize("parallel", ["pipeline = 2", "data = 2\n    zero = 1"])
def test_a_resumed_run_equals_an_uninterrupted_one(parallel: str, tmp_path: Path) -> None:
    plan = make_plan(tmp_path, parallel, precision="bf16" if "data" in parallel else "fp32")
    go(plan, tmp_path, log_dir=tmp_path / "whole", save_every=0)
    go(plan, tmp_path, log_dir=tmp_path / "parts", steps=3)
    go(plan, tmp_path, log_dir=None, resume=tmp_path / "parts")
    whole, parts = weights(tmp_path / "whole", 6), weights(tmp_path / "parts", 6)
    assert whole.keys() == parts.keys() and len(whole) > 4
    assert [name for name, value in whole.items() if not torch.equal(value, parts[name])] == []

    def losses(name: str) -> list[tuple[Any, Any]]:
        records = read_log(tmp_path / name / "log.jsonl")
        return [(r["step"], r["loss"]) for r in records if r["event"] == "step"]

    assert losses("whole") == losses("parts")


def test_a_run_goes_on_from_its_own_folder_alone(tmp_path: Path) -> None:
    """Its plan lies there, and data is still found where the spec was."""
    from titan.compiler.plan.file import read_plan
    from titan.runtime.prepare import prepare

    (tmp_path / "text.txt").write_text("a text that is long enough to be cut into sequences. " * 40)
    prepare([tmp_path / "text.txt"], tmp_path / "text.tokens", "byte")
    spec = make_plan(tmp_path, data='tokens("text.tokens")', vocab=257)
    log = tmp_path / "elsewhere" / "log"
    go(spec, tmp_path, log_dir=log, steps=1)
    outcome = go(read_plan(log / "run.plan"), log, log_dir=None, resume=log, steps=2)
    assert outcome.code == 0 and outcome.result is not None
    assert outcome.result["steps"] == 2 and outcome.result["validation_loss"] is None


def test_saves_are_kept_two_at_a_time(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, steps=5)
    go(plan, tmp_path, save_every=1)
    names = sorted(path.name for path in (tmp_path / "log" / "checkpoints").iterdir())
    assert names == ["step-00000004", "step-00000005"]


def test_another_plan_is_refused(tmp_path: Path) -> None:
    go(make_plan(tmp_path, steps=2), tmp_path, steps=1)
    other = make_plan(tmp_path, steps=2, seed=7)
    with pytest.raises(TitanError) as refused:
        go(other, tmp_path, log_dir=None, resume=tmp_path / "log")
    assert code_of(refused) == "T621"


def test_damage_is_found_by_hash_and_the_save_before_is_named(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, steps=3)
    go(plan, tmp_path, steps=2, save_every=1)
    victim = tmp_path / "log" / "checkpoints" / "step-00000002" / "rank-00001.safetensors"
    content = bytearray(victim.read_bytes())
    content[-3] ^= 1
    victim.write_bytes(content)
    with pytest.raises(TitanError) as refused:
        go(plan, tmp_path, log_dir=None, resume=tmp_path / "log")
    assert code_of(refused) == "T622"
    assert "rank-00001" in refused.value.diagnostics[0].message
    before = tmp_path / "log" / "checkpoints" / "step-00000001"
    assert go(plan, tmp_path, log_dir=None, resume=before).code == 0


@pytest.mark.parametrize("damage", ["cut", "edited", "empty", "list"])
def test_a_damaged_manifest_is_refused(damage: str, tmp_path: Path) -> None:
    plan = make_plan(tmp_path, steps=2)
    go(plan, tmp_path, steps=1)
    manifest = tmp_path / "log" / "checkpoints" / "step-00000001" / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(
        {"cut": text[:50], "edited": text.replace('step\\": 1', 'step\\": 0'), "empty": "", "list": "[]"}[damage]
    )
    with pytest.raises(TitanError) as refused:
        go(plan, tmp_path, log_dir=None, resume=tmp_path / "log")
    assert code_of(refused) == "T622"


def test_resuming_from_nothing_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(TitanError) as refused:
        go(make_plan(tmp_path), tmp_path, log_dir=None, resume=tmp_path / "missing")
    assert code_of(refused) == "T620"
    assert not (tmp_path / "missing").exists()


def test_a_folder_with_checkpoints_is_not_begun_anew(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, steps=2)
    go(plan, tmp_path, steps=1)
    with pytest.raises(TitanError) as refused:
        go(plan, tmp_path)
    assert code_of(refused) == "T618"


def test_a_finished_run_has_nothing_to_go_on_with(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, steps=1)
    go(plan, tmp_path)
    with pytest.raises(TitanError) as refused:
        go(plan, tmp_path, log_dir=None, resume=tmp_path / "log")
    assert code_of(refused) == "T617"


@pytest.mark.parametrize(
    ("data", "code"),
    [('tokens("missing.tokens")', "T501"), ("synthetic(1000)", "T506"), ('tokens("small.titan")', "T50")],
)
def test_wrong_data_is_refused_before_anything_is_written(data: str, code: str, tmp_path: Path) -> None:
    (tmp_path / "small.titan").write_text("no tokens")
    with pytest.raises(TitanError) as refused:
        go(make_plan(tmp_path, data=data), tmp_path)
    assert code_of(refused).startswith(code)
    assert not (tmp_path / "log").exists()


def test_a_plan_for_a_cluster_does_not_start_here(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, "data = 512", ranks=512, batch=512)
    with pytest.raises(TitanError) as refused:
        go(plan, tmp_path)
    assert code_of(refused) == "T607"


def test_a_plan_larger_than_free_memory_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan.runtime.launch.available_memory", lambda: 100_000)
    with pytest.raises(TitanError) as refused:
        go(make_plan(tmp_path), tmp_path)
    assert code_of(refused) == "T607"


def test_an_unexpected_error_of_one_rank_is_shown_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(tmp_path)

    def load(self: SyntheticSource, indices: Any, start: int, stop: int) -> Any:
        raise ArithmeticError("the disk is on fire")

    monkeypatch.setattr(SyntheticSource, "load", load)
    with pytest.raises(TitanError) as failed:
        go(plan, tmp_path)
    (diagnostic,) = failed.value.diagnostics
    assert failed.value.exit_code == 1 and diagnostic.code == "T616"
    assert "the disk is on fire" in diagnostic.message
    assert "load_batch" in diagnostic.notes[0].text


def test_a_run_without_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TitanError) as refused:
        total_steps(make_plan(tmp_path, steps="none"))
    assert code_of(refused) == "T617"


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    from titan.runtime.launch import locked

    with locked(tmp_path / "log"), pytest.raises(TitanError) as refused:
        go(make_plan(tmp_path), tmp_path)
    assert code_of(refused) == "T618"


def test_json_holds_no_nan(tmp_path: Path) -> None:
    from titan.runtime.log import Log

    with Log(tmp_path) as log:
        log.write({"event": "step", "step": 1, "loss": float("nan"), "inner": [float("inf"), 1.0]})
    assert json.loads((tmp_path / "log.jsonl").read_text()) == {
        "event": "step", "step": 1, "loss": None, "inner": [None, 1.0]
    }  # fmt: skip


def test_default_folder_is_named_for_the_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from titan.runtime.launch import run_folder

    monkeypatch.chdir(tmp_path)
    folder = run_folder(Options(root=tmp_path, name="mine"))
    assert folder.parent == tmp_path / "runs" and folder.name.startswith("mine-")
