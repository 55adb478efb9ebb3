"""Data as a pure function of the global sample index: the same whatever the layout, the world or the point of resume.

Sample i of sequence length S is tokens i*S .. i*S+S-1, its labels the tokens one further on. Each epoch visits all
samples once, in an order that (seed, epoch) fixes and that is computed per index.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from titan.grammar.diagnostics import Diagnostic, Note, TitanError
from titan.runtime.permutation import derive_key, permute
from titan.runtime.tokenfile import TokenFile, entropy, open_tokens

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

IGNORED = -100  # a label that counts for nothing
DESCRIPTIONS = ("shakespeare", 'tokens("corpus.tokens")', "synthetic(1024)")
HELD_OUT = 0.1  # share of a shipped corpus that is its validation split


class TokenSource(Protocol):
    """A row of tokens. `window` gives tokens start..stop-1 and their labels, int64 [stop - start] each."""

    @property
    def name(self) -> str: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def count(self) -> int:
        """Number of tokens."""
        ...

    def window(self, start: int, stop: int) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64]]: ...
    def unigram_entropy(self) -> float:
        """Entropy in nats of the row's own unigram distribution: the loss that a model without context can reach."""
        ...


@dataclass(frozen=True, slots=True)
class FileSource:
    """The tokens of a token file."""

    file: TokenFile

    @property
    def name(self) -> str:
        return str(self.file.path)

    @property
    def vocabulary(self) -> int:
        return self.file.header.vocabulary

    @property
    def count(self) -> int:
        return self.file.header.count

    def window(self, start: int, stop: int) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64]]:
        tokens = self.file.read(start, stop + 1)
        return tokens[:-1], tokens[1:]

    def unigram_entropy(self) -> float:
        return entropy(self.file.unigram_counts())


@dataclass(frozen=True, slots=True)
class SyntheticSource:
    """Uniform pseudo-random tokens, a pure function of (seed, place); `ignore_fraction` of the labels is ignored."""

    vocabulary: int
    seed: int = 0
    ignore_fraction: float = 0.0
    count: int = 1 << 40

    @property
    def name(self) -> str:
        return f"synthetic({self.vocabulary})"

    def window(self, start: int, stop: int) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64]]:
        import numpy

        tokens = (self._hash(start, stop + 1, salt=1) % numpy.uint64(self.vocabulary)).astype(numpy.int64)
        labels = tokens[1:]
        if self.ignore_fraction > 0:
            draw = (self._hash(start, stop, salt=2) >> numpy.uint64(11)) * 2.0**-53
            labels = numpy.where(draw < self.ignore_fraction, numpy.int64(IGNORED), labels)
        return tokens[:-1], labels

    def unigram_entropy(self) -> float:
        import math

        return math.log(self.vocabulary)

    def _hash(self, start: int, stop: int, salt: int) -> NDArray[numpy.uint64]:
        """`mix` of `permutation`, for many places at once; unsigned arithmetic wraps as it should."""
        import numpy

        key = numpy.uint64(derive_key(self.seed, salt))
        value = numpy.arange(start, stop, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15) + key
        value = (value ^ (value >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
        return value ^ (value >> numpy.uint64(31))


@dataclass(frozen=True, slots=True)
class Samples:
    """A row cut to samples of `sequence` tokens. Indices go on over epochs; without a seed the order is the row's."""

    source: TokenSource
    sequence: int
    seed: int | None = None

    @property
    def count(self) -> int:
        """Samples per epoch."""
        return (self.source.count - 1) // self.sequence

    def locate(self, index: int) -> int:
        """Which sample of the source the global index means."""
        epoch, position = divmod(index, self.count)
        if index < 0:
            raise ValueError(f"sample index {index} is negative")
        return position if self.seed is None else permute(position, self.count, derive_key(self.seed, epoch))

    def sample(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels of one sample, int64 [sequence] each."""
        tokens, labels = self.load((index,))
        return tokens[0], labels[0]

    def load(
        self, indices: Sequence[int], start: int = 0, stop: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Places start..stop-1 of the sequence dim of the samples: tokens and labels, int64 [n, stop - start] each."""
        stop = self.sequence if stop is None else stop
        if not 0 <= start <= stop <= self.sequence:
            raise ValueError(f"places {start}..{stop} of a sequence of {self.sequence}")
        tokens = torch.empty(len(indices), stop - start, dtype=torch.int64)
        labels = torch.empty_like(tokens)
        for row, index in enumerate(indices):
            base = self.locate(index) * self.sequence
            values, targets = self.source.window(base + start, base + stop)
            tokens[row] = torch.from_numpy(values)
            labels[row] = torch.from_numpy(targets)
        return tokens, labels


def open_data(description: str, root: Path) -> TokenSource:
    """The training split that a spec's `data` names; relative paths count from `root`, the spec's folder.

    `shakespeare` (shipped; tokenised on first use), `tokens("FILE")` or a path, `synthetic(VOCABULARY[, IGNORED])`.
    Errors: T501 to T505, T509, T513.
    """
    return _open(description, root, held_out=False)


def open_validation(description: str, root: Path) -> TokenSource | None:
    """The held-out split beside the training split of `open_data`, or None where there is none."""
    path = _token_path(description, root)
    if path is not None and not _validation_path(path).exists():
        return None
    return _open(description, root, held_out=True)


def check_data(source: TokenSource, sequence: int, global_batch: int, vocabulary: int) -> tuple[Diagnostic, ...]:
    """What forbids training on `source` with batches of `global_batch` sequences and a model of `vocabulary` entries.

    T506 vocabulary too small for the tokens, T507 less than one global batch, T508 less than one sequence.
    """
    found: list[Diagnostic] = []
    if source.vocabulary > vocabulary:
        message = f"{source.name} has tokens of a vocabulary of {source.vocabulary:,}, the model's has {vocabulary:,}"
        found.append(Diagnostic("T506", message, nearest=(f"vocab = {source.vocabulary}",)))
    samples = (source.count - 1) // sequence
    if samples < 1:
        message = f"sequence = {sequence:,} needs {sequence + 1:,} tokens, {source.name} has {source.count:,}"
        found.append(Diagnostic("T508", message, nearest=(f"sequence <= {max(source.count - 1, 0):,}",)))
    elif samples < global_batch:
        message = (
            f"one global batch is {global_batch:,} sequences of {sequence:,} tokens, "
            f"but the data {source.name} has {samples:,} ({source.count:,} tokens)"
        )
        notes = (Note("a rank would read a sequence twice within one step"),)
        found.append(Diagnostic("T507", message, nearest=(f"global_batch <= {samples:,}",), notes=notes))
    return tuple(found)


def _open(description: str, root: Path, held_out: bool) -> TokenSource:
    from titan.runtime.corpus import CORPORA

    if description in CORPORA:
        return FileSource(_open_corpus(description, root, held_out))
    if (match := re.fullmatch(r"synthetic\(\s*(\d{1,9})\s*(?:,\s*(0?\.\d+|0))?\s*\)", description)) and int(match[1]):
        return SyntheticSource(int(match[1]), seed=int(held_out), ignore_fraction=float(match[2] or 0))
    path = _token_path(description, root)
    if path is None:
        raise TitanError(Diagnostic("T513", f"`{description}` does not say where the data is", nearest=DESCRIPTIONS))
    return FileSource(open_tokens(_validation_path(path) if held_out else path))


def _token_path(description: str, root: Path) -> Path | None:
    """The file of `tokens("FILE")` or of a bare path, which has a dot or a slash."""
    match = re.fullmatch(r"""tokens\(\s*(["'])(.+)\1\s*\)""", description)
    name = match[2] if match else description
    if not match and ("(" in name or not re.search(r"[./\\]", name)):
        return None
    return root / Path(name).expanduser()


def _validation_path(path: Path) -> Path:
    from titan.runtime.prepare import validation_path

    return validation_path(path)


def _open_corpus(name: str, root: Path, held_out: bool) -> TokenFile:
    """A shipped corpus in the shipped vocabulary, from the cache or made now; a damaged cache file is made anew.

    Safe for several processes at once: all write the same bytes, and files appear whole.
    """
    from titan.runtime.corpus import CORPORA, read_corpus
    from titan.runtime.prepare import prepare_texts
    from titan.runtime.tokenizer import FOLDER, load_tokenizer

    vocabulary = hashlib.sha256((FOLDER / "bpe1024.json").read_bytes()).hexdigest()
    key = hashlib.sha256(f"{CORPORA[name][1]} {vocabulary} {HELD_OUT}".encode()).hexdigest()[:16]
    train = cache_folder(root) / f"{name}-{key}.tokens"
    wanted = _validation_path(train) if held_out else train
    try:
        return open_tokens(wanted)
    except TitanError:
        texts = read_corpus(name)
        total = sum(len(text.encode("utf-8")) for text in texts)
        lines = (text.splitlines(keepends=True) for text in texts)
        prepare_texts(lines, total, train, load_tokenizer("bpe1024"), HELD_OUT)
        return open_tokens(wanted)


def cache_folder(root: Path) -> Path:
    """`$XDG_CACHE_HOME/titan`, by default `~/.cache/titan`; `root/.titan` if that is read-only. Errors: T515."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    candidates = (Path(home).expanduser() / "titan", root / ".titan")
    for folder in candidates:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError):
            continue
        if os.access(folder, os.W_OK):
            return folder
    message = "there is no place for prepared data: " + " and ".join(map(str, candidates)) + " cannot be written"
    raise TitanError(Diagnostic("T515", message))
