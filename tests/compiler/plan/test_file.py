from __future__ import annotations

import gzip
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from titan.compiler.plan.file import PlanFileError, plan_hash, read_plan, write_plan

from tests.compiler.plan.small_plans import two_stages


def refusal(path: Path) -> str:
    with pytest.raises(PlanFileError) as caught:
        read_plan(path)
    return caught.value.code


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.plan"
    write_plan(two_stages(), path)
    return path


def test_round_trip_and_nothing_left_beside_it(file: Path) -> None:
    assert read_plan(file) == two_stages()
    assert [p.name for p in file.parent.iterdir()] == ["a.plan"]


def test_equal_plans_are_equal_files(file: Path, tmp_path: Path) -> None:
    write_plan(two_stages(), tmp_path / "b.plan")
    assert (tmp_path / "b.plan").read_bytes() == file.read_bytes()


def test_hash_stands_in_the_first_line_and_tells_plans_apart(file: Path) -> None:
    plan = two_stages()
    head = gzip.decompress(file.read_bytes()).split(b"\n")[0].decode()
    assert head == f"titan plan 1 sha256 {plan_hash(plan)}"
    assert plan_hash(replace(plan, settings=(("train.sequence", "5"),))) != plan_hash(plan)


def test_what_is_written_has_the_hash_that_is_given(tmp_path: Path) -> None:
    assert write_plan(two_stages(), tmp_path / "a.plan") == plan_hash(two_stages())


def test_any_cut_is_refused(file: Path) -> None:
    whole = file.read_bytes()
    for length in {0, 1, 5, 12, len(whole) // 2, len(whole) - 9, len(whole) - 1}:
        file.write_bytes(whole[:length])
        assert refusal(file) in ("T401", "T404")


def test_a_flipped_bit_is_refused_or_meant_nothing(file: Path) -> None:
    whole = file.read_bytes()
    refused, tried = 0, range(10, len(whole), 7)  # the first ten bytes are gzip's own head: time stamp and system
    for place in tried:
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        try:
            assert read_plan(file) == two_stages()  # a bit of padding
        except PlanFileError:
            refused += 1
    assert refused >= len(tried) - 2


def test_edited_text_is_refused(file: Path) -> None:
    text = gzip.decompress(file.read_bytes())
    file.write_bytes(gzip.compress(text.replace(b"peer=1", b"peer=2")))
    assert refusal(file) == "T405"
    file.write_bytes(gzip.compress(text.split(b" sha256")[0] + b"\n" + text.split(b"\n", 1)[1]))
    assert refusal(file) == "T405"


def test_other_version_and_other_files_are_refused(file: Path) -> None:
    text = gzip.decompress(file.read_bytes())
    file.write_bytes(gzip.compress(text.replace(b"titan plan 1", b"titan plan 2", 1)))
    assert refusal(file) == "T402"
    file.write_bytes(text)
    assert refusal(file) == "T401"
    file.write_bytes(gzip.compress(b"hello\n"))
    assert refusal(file) == "T401"


def test_appended_bytes_are_refused(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"more")
    assert refusal(file) == "T404"


def test_a_bomb_is_refused_without_expanding_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan.compiler.plan.file.LARGEST_TEXT", 4 << 20)
    squeeze = zlib.compressobj(9, wbits=31)
    pieces = [squeeze.compress(bytes(1 << 20)) for _ in range(40)]
    file.write_bytes(b"".join([*pieces, squeeze.flush()]))
    assert refusal(file) == "T406"


def test_a_failed_write_leaves_the_old_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError):
        write_plan(two_stages(5), file)
    assert file.read_bytes() == before
    assert [p.name for p in file.parent.iterdir()] == ["a.plan"]
