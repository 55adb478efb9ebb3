"""Input that is wrong on purpose: each a coded error, exit code 2, quickly, with nothing written."""

from __future__ import annotations

import gzip
import os
import time
from pathlib import Path

import pytest
from titan.compiler.cli import run

from tests.clock import slowness

ROOT = Path(__file__).parents[2]
QUICKSTART = (ROOT / "examples" / "quickstart.titan").read_text()

CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "ten_megabytes": b"a = 1\n" * 1_700_000,
    "nested": b"a = " + b"{ b = " * 10_000 + b"1" + b" }" * 10_000,
    "nul": b"a = \x00\n",
    "not_utf8": b"a = \xff\xfe\n",
    "binary": bytes(range(256)) * 40,
    "huge_number": b"a = " + b"9" * 5_000 + b"\n",
    "misspelt_key": QUICKSTART.replace("hidden", "hiden").encode(),
    "wrong_unit": QUICKSTART.replace("92% of device", "92 Gb/s of device").encode(),
    "zero": QUICKSTART.replace("hidden        = 128", "hidden = 0").encode(),
    "negative": QUICKSTART.replace("steps        = 200", "steps = -5").encode(),
    "world_size": QUICKSTART.replace("tensor   = 2", "tensor = 3").encode(),
    "heads": QUICKSTART.replace("heads = 4, kv_heads = 2", "heads = 5, kv_heads = 2").encode(),
    "batch": QUICKSTART.replace("global_batch = 16", "global_batch = 1000 tokens").encode(),
    "unknown_import": b"import models.nothing\n" + QUICKSTART.encode(),
    "import_outside": b"import .. secrets\n" + QUICKSTART.encode(),
}


@pytest.mark.parametrize("command", ["check", "plan", "run"])
@pytest.mark.parametrize("name", CONTENTS)
def test_hostile_specs(name: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / f"{name}.titan"
    spec.write_bytes(CONTENTS[name])
    refused(capsys, command, str(spec))
    assert list(tmp_path.iterdir()) == [spec]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The command is refused with codes, quickly; its stderr."""
    capsys.readouterr()
    start = time.perf_counter()
    code = run(list(arguments))
    out, err = capsys.readouterr()
    assert code == 2, err
    assert out == "" and "error T" in err
    assert "Traceback" not in err and "T600" not in err
    assert time.perf_counter() - start < 4 * slowness()
    return err


@pytest.mark.parametrize("command", ["check", "plan", "verify", "inspect", "explain", "run", "fmt", "diff"])
def test_missing_files_and_folders(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twice = 2 if command == "diff" else 1
    for path in (tmp_path / "no.titan", tmp_path, tmp_path / "no.plan", Path("/dev/null")):
        refused(capsys, command, *[str(path)] * twice)


def test_a_path_with_a_nul(capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, "check", "a\0b.titan")
    refused(capsys, "verify", "a\0b.plan")


@pytest.fixture(scope="module")
def plan_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("plans") / "good.plan"
    assert run(["plan", str(ROOT / "examples" / "tiny_dp.titan"), "-o", str(path)]) == 0
    return path.read_bytes()


def damaged(good: bytes, how: str) -> bytes:
    text = gzip.decompress(good)
    return {
        "cut": good[: len(good) // 2],
        "flipped": good[:200] + bytes([good[200] ^ 4]) + good[201:],
        "followed": good + b"more",
        "edited": gzip.compress(text.replace(b"all_reduce", b"all_gather", 1).replace(b"forward", b"backward", 1)),
        "newer": gzip.compress(text.replace(b"titan plan 1", b"titan plan 2", 1)),
        "other": gzip.compress(b"hello"),
        "bomb": gzip.compress(bytes(300 << 20), 1),
        "nothing": gzip.compress(b""),
    }[how]


@pytest.mark.parametrize("how", ["cut", "flipped", "followed", "edited", "newer", "other", "bomb", "nothing"])
@pytest.mark.parametrize("command", ["verify", "inspect", "run"])
def test_damaged_plans(
    how: str, command: str, plan_bytes: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.plan"
    path.write_bytes(damaged(plan_bytes, how))
    assert "error T4" in refused(capsys, command, str(path))
    assert list(tmp_path.iterdir()) == [path]


def test_a_plan_with_a_true_hash_but_wrong_instructions_is_not_run(
    plan_bytes: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from dataclasses import replace

    from titan.compiler.plan.file import read_plan, write_plan

    path = tmp_path / "bad.plan"
    path.write_bytes(plan_bytes)
    plan = read_plan(path)
    role = plan.roles[0]
    blocks = tuple(b if b.name != "norm" else replace(b, instructions=b.instructions[1:]) for b in role.blocks)
    write_plan(replace(plan, roles=(replace(role, blocks=blocks),)), path)
    assert "error T7" in refused(capsys, "run", str(path))
    assert list(tmp_path.iterdir()) == [path]


def test_output_places_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place in (tmp_path, tmp_path / "missing" / "my.plan"):
        assert "error T603" in refused(capsys, "plan", str(ROOT / "examples" / "tiny_dp.titan"), "-o", str(place))


def test_a_profile_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert "no right to write there" in refused(capsys, "profile", "-o", str(tmp_path / "here.titan"))
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_of_an_output_when_the_spec_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "wrong.titan"
    spec.write_bytes(CONTENTS["heads"])
    refused(capsys, "plan", str(spec), "-o", str(tmp_path / "my.plan"))
    assert os.listdir(tmp_path) == ["wrong.titan"]


def test_a_pipe_of_our_own_that_breaks_is_a_failure(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ended while it was told something: with output still read, that is no success."""

    def broken(**_: object) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("titan.compiler.commands.passes.passes.callback", broken)
    assert run(["passes"]) == 1
    assert "T600" in capfd.readouterr().err
