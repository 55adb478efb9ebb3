"""Commands beside the road: fmt, mfu, passes, data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.compiler.test_cli import titan

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "examples" / "quickstart.titan")


def test_fmt_changes_only_what_is_not_formatted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.titan", tmp_path / "bad.titan"
    good.write_text(Path(QUICKSTART).read_text())
    bad.write_text(Path(QUICKSTART).read_text().replace("    steps ", "  steps   "))
    before = good.stat().st_mtime_ns
    assert titan(capsys, "fmt", "--check", str(good), str(bad))[0] == 1
    assert "  steps   " in bad.read_text()
    code, out, _ = titan(capsys, "fmt", "--json", str(good), str(bad))
    assert code == 0 and json.loads(out) == {"changed": [str(bad)]}
    assert bad.read_bytes() == good.read_bytes() and good.stat().st_mtime_ns == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.titan", "good.titan"]


def test_fmt_writes_nothing_when_one_file_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loose, broken = tmp_path / "loose.titan", tmp_path / "broken.titan"
    loose.write_text("a   =   1\n")
    broken.write_text("train {\n")
    assert titan(capsys, "fmt", str(loose), str(broken))[0] == 2
    assert loose.read_text() == "a   =   1\n"


def test_mfu_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    spec = str(ROOT / "examples" / "llama3_70b_1024gpu.titan")
    code, out, _ = titan(capsys, "mfu", spec, "--tokens-per-second-per-device", "900", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["mfu_simple"] == pytest.approx(6 * 70_553_706_496 * 900 / 989e12, rel=1e-3)
    _, other, _ = titan(capsys, "mfu", spec, "--tokens-per-second", str(900 * 1024), "--json")
    assert json.loads(other) == found


@pytest.mark.parametrize("arguments", [[], ["--step-time", "1", "--tokens-per-second", "1"], ["--step-time", "0"]])
def test_mfu_takes_one_positive_measure(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert titan(capsys, "mfu", QUICKSTART, *arguments)[0] == 2


SIXTEEN = ("--devices", "16", "--peak", "1000 TFLOP/s", "--tokens-per-second", "24000")


@pytest.mark.parametrize("size", ["70e9", "70G", "70B", "70 b"])
def test_mfu_takes_a_size_as_it_is_written(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`70B` is how models say it; nobody means 70 bytes."""
    code, out, _ = titan(capsys, "mfu", "--parameters", size, *SIXTEEN, "--json")
    assert code == 0 and json.loads(out)["mfu_simple"] == pytest.approx(0.63)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "llama.llama3_70b", "--sequence", "8192", *SIXTEEN[2:]], "number of devices is needed"),
        (["--parameters", "70G", *SIXTEEN, "--recompute", "full"], "needs the layers"),
        (["--parameters", "70G", *SIXTEEN, "--sequence", "8192"], "--sequence belongs to --model"),
        (["--parameters", "7MB", *SIXTEEN], "is in bytes, not a plain number"),
    ],
)
def test_mfu_leaves_no_option_out_silently(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = titan(capsys, "mfu", *arguments)
    assert code == 2 and said in error


def test_passes_are_those_of_the_registry(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = titan(capsys, "passes", "--json")
    names = [row["name"] for row in json.loads(out)]
    files = {path.stem for path in (ROOT / "compiler" / "passes").glob("*.py")}
    assert names and set(names) <= files
    assert all(row["does"] for row in json.loads(out))


def test_data_prepare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be\n" * 50)
    output = tmp_path / "text.tokens"
    arguments = ("data", "prepare", str(text), "-o", str(output), "--tokenizer", "byte", "--json")
    code, out, _ = titan(capsys, *arguments)
    assert code == 0 and output.exists()
    assert json.loads(out)["train"]["text_bytes"] == text.stat().st_size
    code, _, err = titan(capsys, "data", "prepare", str(tmp_path / "no.txt"), "-o", str(tmp_path / "no.tokens"))
    assert code == 2 and "error T5" in err
