"""`titan data prepare`: what is written is the text, cut where it was asked, or nothing at all."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from titan.grammar.catalogue import CATALOGUE
from titan.grammar.diagnostics import TitanError
from titan.runtime import prepare as module
from titan.runtime.corpus import read_corpus
from titan.runtime.prepare import PrepareArguments, prepare, prepare_command, validation_path
from titan.runtime.tokenfile import open_tokens
from titan.runtime.tokenizer import load_tokenizer


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode("utf-8"))
    return path


def tokens_of(path: Path) -> list[int]:
    file = open_tokens(path)
    return [int(token) for token in file.read(0, file.header.count)]


def code_of(paths: list[Path], output: Path, **options: object) -> str:
    """The code with which preparing fails, having written nothing."""
    before = sorted(output.parent.iterdir())
    with pytest.raises(TitanError) as caught:
        prepare(paths, output, **options)  # type: ignore[arg-type]
    assert sorted(output.parent.iterdir()) == before
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code in CATALOGUE
    return diagnostic.code


@pytest.fixture(scope="module")
def verse() -> str:
    return "".join(read_corpus("shakespeare")[:4])


def test_bytes_are_written_as_they_are(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one.txt", "ab\r\nc\n\n"), write(tmp_path / "two.txt", "é")
    result = prepare([one, two], tmp_path / "out.tokens", "byte")
    assert tokens_of(tmp_path / "out.tokens") == [97, 98, 13, 10, 99, 10, 10, 256, 0xC3, 0xA9, 256]
    assert (result.train.tokens, result.train.text_bytes, result.validation) == (11, 9, None)
    assert open_tokens(tmp_path / "out.tokens").header.tokenizer == "byte"


@settings(deadline=None, max_examples=300)
@given(st.text("ab' \n\n\n\t\r", max_size=40))
def test_a_cut_at_any_allowed_place_changes_no_token(text: str) -> None:
    tokenizer = load_tokenizer("bpe1024")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_BYTES", 1)
        pieces = [piece.text for piece in module._pieces([re.findall(r".*\n|.+", text)], None)]
    assert "".join(pieces) == text
    assert [token for piece in pieces for token in tokenizer.encode(piece)] == tokenizer.encode(text)


@pytest.mark.parametrize("piece", (200, 5_000, 1 << 20))
def test_pieces_give_the_tokens_of_the_whole_text(
    tmp_path: Path, verse: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", piece)
    text = verse[:60_000] + "\n\n \n  indented\n\n\n漢字\n  \nend  \n"
    prepare([write(tmp_path / "a.txt", text)], tmp_path / "out.tokens", "bpe1024")
    tokenizer = load_tokenizer("bpe1024")
    assert tokens_of(tmp_path / "out.tokens") == [*tokenizer.encode(text), tokenizer.end_of_text]


@pytest.mark.parametrize("fraction", (0.1, 0.5))
def test_held_out_split_is_the_rest_of_the_text(tmp_path: Path, verse: str, fraction: float) -> None:
    half = len(verse) // 2
    paths = [write(tmp_path / "a.txt", verse[:half]), write(tmp_path / "b.txt", verse[half:])]
    output = tmp_path / "out.tokens"
    result = prepare(paths, output, "bpe1024", fraction)
    tokenizer = load_tokenizer("bpe1024")
    train, held_out = (tokenizer.decode(tokens_of(path)) for path in (output, validation_path(output)))
    assert train + held_out == verse
    assert len(held_out) / len(verse) == pytest.approx(fraction, abs=0.001)
    assert held_out.startswith("\n")  # cut at a line break
    assert result.validation is not None and result.validation.text_bytes == len(held_out)


def test_entropies_are_those_of_the_counts(tmp_path: Path, verse: str) -> None:
    output = tmp_path / "out.tokens"
    result = prepare([write(tmp_path / "a.txt", verse)], output, "byte", 0.2)
    train, held_out = Counter(tokens_of(output)), Counter(tokens_of(validation_path(output)))
    total = held_out.total()
    own = -sum(n / total * math.log(n / total) for n in held_out.values())
    crossed = -sum(n / total * math.log((train[t] + 1) / (train.total() + 257)) for t, n in held_out.items())
    assert result.validation is not None
    assert result.validation.unigram_entropy == pytest.approx(own, rel=1e-12)
    assert result.train_unigram_loss == pytest.approx(crossed, rel=1e-12)


def test_same_text_gives_the_same_bytes(tmp_path: Path, verse: str) -> None:
    text = write(tmp_path / "a.txt", verse)
    for name in ("one", "two"):
        prepare([text], tmp_path / f"{name}.tokens", "bpe1024", 0.1)
    assert (tmp_path / "one.tokens").read_bytes() == (tmp_path / "two.tokens").read_bytes()
    held_out = [validation_path(tmp_path / f"{name}.tokens").read_bytes() for name in ("one", "two")]
    assert held_out[0] == held_out[1]


def test_progress_grows_to_the_whole(tmp_path: Path, verse: str) -> None:
    seen: list[tuple[int, int]] = []
    text = write(tmp_path / "a.txt", verse)
    prepare([text], tmp_path / "out.tokens", "byte", 0.1, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (len(verse), len(verse)) and len(seen) > 2
    assert all(a < b for (a, _), (b, _) in itertools.pairwise(seen))


def test_command_reports_to_people_and_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = write(tmp_path / "a.txt", "one line\n" * 1000)
    output = tmp_path / "out.tokens"
    assert prepare_command(PrepareArguments((text,), output, "byte", 0.1, json=True)) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["train"]["tokens"] == open_tokens(output).header.count
    assert f"{report['validation']['unigram_entropy']:.3f} nats" in captured.err


def test_hostile_input_leaves_nothing_behind(tmp_path: Path) -> None:
    good, empty = write(tmp_path / "good.txt", "a\n" * 100), write(tmp_path / "empty.txt", "")
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"ok\n" * 10 + b"caf\xe9\n")
    output = tmp_path / "out.tokens"
    assert code_of([tmp_path / "god.txt"], output) == "T501"
    assert code_of([tmp_path], output) == "T501"
    assert code_of([good, empty], output) == "T509"
    assert code_of([], output) == "T509"
    assert code_of([good], output, tokenizer="bpe1025") == "T510"
    assert code_of([good, latin], output) == "T512"
    assert code_of([good], output, validation_fraction=10.0) == "T514"
    assert code_of([good], output, validation_fraction=math.nan) == "T514"
    assert code_of([write(tmp_path / "line.txt", "one line")], output, validation_fraction=0.5) == "T514"
    assert code_of([good], good, tokenizer="byte") == "T515"
    assert code_of([good], tmp_path, tokenizer="byte") == "T515"
    with pytest.raises(TitanError, match="T515"):
        prepare([good], tmp_path / "no" / "folder.tokens", "byte")
    assert not output.exists()


def test_not_utf8_names_the_byte(tmp_path: Path) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"ok\n" * 10 + b"caf\xe9\n")
    with pytest.raises(TitanError, match=r"byte 33 is 0xe9"):
        prepare([latin], tmp_path / "out.tokens", "byte")


def test_stale_validation_file_is_refused(tmp_path: Path) -> None:
    text, output = write(tmp_path / "a.txt", "line\n" * 50), tmp_path / "out.tokens"
    prepare([text], output, "byte", 0.2)
    assert code_of([text], output, tokenizer="byte") == "T515"


def test_failure_keeps_the_earlier_file(tmp_path: Path) -> None:
    text, output = write(tmp_path / "a.txt", "line\n" * 50), tmp_path / "out.tokens"
    prepare([text], output, "byte")
    before = output.read_bytes()
    text.write_bytes(b"line\n\xff")
    assert code_of([text], output, tokenizer="byte") == "T512"
    assert output.read_bytes() == before


def test_interrupt_leaves_nothing_behind(tmp_path: Path, verse: str) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    text = write(tmp_path / "a.txt", verse)
    with pytest.raises(KeyboardInterrupt):
        prepare([text], tmp_path / "out.tokens", "byte", 0.1, stop)
    assert list(tmp_path.iterdir()) == [text]
