"""The token file: round trip, header, and every way of being broken."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest
from titan.grammar.catalogue import CATALOGUE
from titan.grammar.diagnostics import TitanError
from titan.runtime.tokenfile import HEADER_BYTES, TokenFile, TokenWriter, open_tokens


def make(path: Path, tokens: list[int], vocabulary: int, name: str = "byte") -> Path:
    with TokenWriter(path, vocabulary, name) as writer:
        writer.append(tokens)
        writer.publish()
    return path


def code_of(path: Path) -> str:
    with pytest.raises(TitanError) as caught:
        open_tokens(path)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code in CATALOGUE
    return diagnostic.code


def resealed(content: bytes, offset: int, field: bytes) -> bytes:
    """The file with a header field changed and the header's checksum made right again."""
    fields = bytearray(content[:128])
    fields[offset : offset + len(field)] = field
    return bytes(fields) + struct.pack("<I", zlib.crc32(fields)) + content[132:]


@pytest.mark.parametrize(("vocabulary", "width"), ((257, 2), (65_536, 2), (65_537, 4), (300_000, 4)))
def test_round_trip(tmp_path: Path, vocabulary: int, width: int) -> None:
    tokens = [0, vocabulary - 1, 7, vocabulary // 2] * 5
    path = make(tmp_path / "a.tokens", tokens, vocabulary, "ü" * 40)
    file = open_tokens(path)
    assert file.read(0, 20).tolist() == tokens and file.read(3, 5).tolist() == tokens[3:5]
    assert (file.header.vocabulary, file.header.count, file.header.width) == (vocabulary, 20, width)
    assert file.header.tokenizer.startswith("ü" * 30)
    assert path.stat().st_size == HEADER_BYTES + 20 * width
    assert path.read_bytes()[HEADER_BYTES:] == struct.pack(f"<20{'H' if width == 2 else 'I'}", *tokens)


def test_reading_beyond_the_file_is_an_index_error(tmp_path: Path) -> None:
    file = open_tokens(make(tmp_path / "a.tokens", [1, 2, 3], 10))
    for start, stop in ((0, 4), (-1, 2), (3, 2)):
        with pytest.raises(IndexError):
            file.read(start, stop)


def test_writer_refuses_foreign_tokens_and_publishes_nothing(tmp_path: Path) -> None:
    for token in (-1, 10):
        with pytest.raises(ValueError), TokenWriter(tmp_path / "a.tokens", 10, "byte") as writer:
            writer.append([1, token])
    assert list(tmp_path.iterdir()) == []


def test_missing_file_names_its_neighbours(tmp_path: Path) -> None:
    make(tmp_path / "corpus.tokens", [1], 2)
    with pytest.raises(TitanError) as caught:
        open_tokens(tmp_path / "corpsu.tokens")
    assert caught.value.diagnostics[0].code == "T501"
    assert caught.value.diagnostics[0].nearest == ("corpus.tokens",)
    assert code_of(tmp_path) == "T501"  # a folder
    assert code_of(tmp_path / "no" / "such.tokens") == "T501"


def test_broken_files(tmp_path: Path) -> None:
    content = make(tmp_path / "good.tokens", list(range(50)), 64).read_bytes()
    flipped = bytearray(content)
    flipped[300] ^= 1
    unsealed = bytearray(content)
    unsealed[16] ^= 1
    cases = {
        b"": "T502",
        b"To be, or not to be": "T502",
        b"\0" * 1000: "T502",
        content[:100]: "T504",
        content[:-1]: "T504",
        content + b"\0\0": "T504",
        content[:HEADER_BYTES]: "T504",
        bytes(flipped): "T505",
        bytes(unsealed): "T505",
        content[:200] + b"x" + content[201:]: "T505",
        resealed(content, 8, struct.pack("<I", 2)): "T503",
        resealed(content, 12, struct.pack("<I", 3)): "T505",
        resealed(content, 12, struct.pack("<I", 4)): "T504",
        resealed(content, 16, struct.pack("<Q", 1 << 60)): "T505",
        resealed(content, 16, struct.pack("<Q", 10)): "T505",  # tokens beyond the vocabulary
        resealed(content, 24, struct.pack("<Q", 1 << 62)): "T504",
        resealed(content, 24, struct.pack("<Q", 0))[:HEADER_BYTES]: "T509",
    }
    for number, (broken, code) in enumerate(cases.items()):
        path = tmp_path / f"broken{number}.tokens"
        path.write_bytes(broken)
        assert code_of(path) == code, number


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    content = make(tmp_path / "good.tokens", list(range(20)), 64).read_bytes()
    path = tmp_path / "bad.tokens"
    for bit in range(0, 8 * len(content), 7):
        broken = bytearray(content)
        broken[bit // 8] ^= 1 << bit % 8
        path.write_bytes(broken)
        assert code_of(path) in ("T502", "T503", "T505")


def test_large_files_are_checked_on_demand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path / "a.tokens", list(range(20)), 64)
    broken = bytearray(path.read_bytes())
    broken[-1] ^= 1
    path.write_bytes(broken)
    monkeypatch.setattr("titan.runtime.tokenfile.CHECKED_ON_OPEN", 40)
    file = open_tokens(path)
    assert isinstance(file, TokenFile)
    with pytest.raises(TitanError, match="T505"):
        file.check()
    with pytest.raises(TitanError, match="T505"):
        open_tokens(path, check=True)
