"""Data as a pure function of the global sample index: the same whatever the layout, the world or the point of resume.

Sample i of sequence length S is tokens i*S .. i*S+S-1, its labels the tokens one further on. Each epoch visits all
samples once, in an order that (seed, epoch) fixes and that is computed per index.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from titan.grammar.diagnostics import Diagnostic, Note, TitanError
from titan.runtime.corpus import CORPORA, read_corpus
from titan.runtime.permutation import GOLDEN, derive_key, permute
from titan.runtime.prepare import prepare_texts, validation_path
from titan.runtime.tokenfile import VERSION, TokenFile, entropy, open_tokens
from titan.runtime.tokenizer import FOLDER, load_tokenizer
from titan.runtime.tokenizer import NAMES as TOKENIZERS

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

IGNORED = -100  # a label that counts for nothing
DESCRIPTIONS = ("shakespeare", 'shakespeare("gpt2")', 'tokens("corpus.tokens")', "synthetic(1024)")
HELD_OUT = 0.1  # share of a shipped corpus that is its validation split


class TokenSource(Protocol):
    """Samples by global index. The same index always gives the same sample; indices go on over epochs."""

    @property
    def name(self) -> str: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def tokens(self) -> int:
        """How many tokens there are."""
        ...

    @property
    def samples(self) -> int:
        """How many samples an epoch has."""
        ...

    def load(self, indices: Sequence[int], start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Places start..stop-1 of the sequence dim of the samples: tokens and labels, int64 [n, stop - start] each."""
        ...

    def unigram_entropy(self) -> float:
        """Entropy in nats of all tokens' own unigram distribution: the least loss that needs no context."""
        ...


@dataclass(frozen=True)
class Around:
    """What a source around another has of that one."""

    inner: TokenSource

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def vocabulary(self) -> int:
        return self.inner.vocabulary

    @property
    def tokens(self) -> int:
        return self.inner.tokens

    @property
    def samples(self) -> int:
        return self.inner.samples

    def unigram_entropy(self) -> float:
        return self.inner.unigram_entropy()


@dataclass(frozen=True)
class Padded(Around):
    """A source whose sequences of `sequence` tokens are filled up at their end: no label of these places counts."""

    sequence: int

    def load(self, indices: Sequence[int], start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        real = max(min(stop, self.sequence) - start, 0)
        shape, lacking = (len(indices), 0), stop - start - real
        empty = torch.zeros(shape, dtype=torch.int64)
        tokens, labels = self.inner.load(indices, start, start + real) if real else (empty, empty)
        pad = torch.nn.functional.pad
        return pad(tokens, (0, lacking)), pad(labels, (0, lacking), value=IGNORED)


@dataclass(frozen=True, slots=True)
class FileSource:
    """A token file cut to samples of `sequence` tokens; without a seed the order is the file's, in every epoch."""

    file: TokenFile
    sequence: int
    seed: int | None = None
    name: str = "data"

    @property
    def vocabulary(self) -> int:
        return self.file.header.vocabulary

    @property
    def tokens(self) -> int:
        return self.file.header.count

    @property
    def samples(self) -> int:
        return (self.tokens - 1) // self.sequence

    def locate(self, index: int) -> int:
        """Which sample of the file the global index means."""
        if index < 0:
            raise ValueError(f"sample index {index} is negative")
        epoch, position = divmod(index, self.samples)
        return position if self.seed is None else permute(position, self.samples, derive_key(self.seed, epoch))

    def sample(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels of one whole sample, int64 [sequence] each."""
        tokens, labels = self.load((index,), 0, self.sequence)
        return tokens[0], labels[0]

    def load(self, indices: Sequence[int], start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= start <= stop <= self.sequence:
            raise ValueError(f"places {start}..{stop} of a sequence of {self.sequence}")
        values = torch.empty(len(indices), stop - start + 1, dtype=torch.int64)
        for row, index in enumerate(indices):
            base = self.locate(index) * self.sequence
            values[row] = torch.from_numpy(self.file.read(base + start, base + stop + 1))
        return values[:, :-1].contiguous(), values[:, 1:].contiguous()

    def unigram_entropy(self) -> float:
        return entropy(self.file.unigram_counts())


@dataclass(frozen=True, slots=True)
class SyntheticSource:
    """Uniform pseudo-random tokens, a pure function of (seed, index, place); serves any sequence length.

    A label is ignored with probability `ignore_fraction`, so that samples differ in how many labels count.
    """

    vocabulary: int
    seed: int = 0
    ignore_fraction: float = 0.0

    @property
    def name(self) -> str:
        return f"synthetic({self.vocabulary})"

    @property
    def tokens(self) -> int:
        return self.samples

    @property
    def samples(self) -> int:
        return 1 << 40

    def load(self, indices: Sequence[int], start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        import numpy

        values = torch.empty(len(indices), stop - start + 1, dtype=torch.int64)
        draws = torch.empty(len(indices), stop - start, dtype=torch.float64)
        for row, index in enumerate(indices):
            drawn = hash_places(derive_key(self.seed, index, 1), start, stop + 1) % numpy.uint64(self.vocabulary)
            values[row] = torch.from_numpy(drawn.astype(numpy.int64))
            places = hash_places(derive_key(self.seed, index, 2), start, stop)
            draws[row] = torch.from_numpy((places >> numpy.uint64(11)) * 2.0**-53)
        labels = torch.where(draws < self.ignore_fraction, IGNORED, values[:, 1:])
        return values[:, :-1].contiguous(), labels

    def unigram_entropy(self) -> float:
        return math.log(self.vocabulary)


def hash_places(key: int, start: int, stop: int) -> NDArray[numpy.uint64]:
    """`mix(key + place * GOLDEN)` of `permutation` for all places start..stop-1; unsigned numbers wrap around."""
    import numpy

    value = numpy.arange(start, stop, dtype=numpy.uint64) * numpy.uint64(GOLDEN) + numpy.uint64(key)
    value = (value ^ (value >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return value ^ (value >> numpy.uint64(31))


def open_data(description: str, root: Path, sequence: int, seed: int | None = None) -> TokenSource:
    """The training split that a spec's `data` names; relative paths count from `root`, the spec's folder.

    `shakespeare` (shipped, tokenised on first use with `bpe1024`), `shakespeare("gpt2")` (with another tokenizer by
    name), `tokens("FILE")` or a bare path, `synthetic(VOCABULARY)`. Errors: T501 to T505, T509 to T511, T513, T515.
    """
    return _open(description, root, sequence, seed, held_out=False)


def open_validation(description: str, root: Path, sequence: int) -> TokenSource | None:
    """The held-out split beside the training split of `open_data`, in its own order; None where there is none."""
    path = _token_path(description, root)
    if path is not None and not validation_path(path).exists():
        return None
    return _open(description, root, sequence, None, held_out=True)


def check_data(source: TokenSource, sequence: int, global_batch: int, vocabulary: int) -> tuple[Diagnostic, ...]:
    """What forbids training on `source` with batches of `global_batch` sequences and a model of `vocabulary` entries.

    T506 vocabulary too small for the tokens, T507 less than one global batch, T508 less than one sequence.
    """
    found: list[Diagnostic] = []
    if source.vocabulary > vocabulary:
        message = f"the data {source.name} has a vocabulary of {source.vocabulary:,}, the model has {vocabulary:,}"
        found.append(Diagnostic("T506", message, nearest=(f"vocab = {source.vocabulary}",)))
    if source.samples < 1:
        message = f"sequence = {sequence:,} needs {sequence + 1:,} tokens, the data {source.name} has {source.tokens:,}"
        found.append(Diagnostic("T508", message, nearest=(f"sequence = {source.tokens - 1:,}",)))
    elif source.samples < global_batch:
        message = (
            f"one global batch is {global_batch:,} sequences of {sequence:,} tokens, "
            f"but the data {source.name} has {source.samples:,} of them ({source.tokens:,} tokens)"
        )
        notes = (Note("within one step a sequence would be read twice"),)
        found.append(Diagnostic("T507", message, nearest=(f"global_batch = {source.samples:,}",), notes=notes))
    return tuple(found)


def _open(description: str, root: Path, sequence: int, seed: int | None, held_out: bool) -> TokenSource:
    name = f"{description}, held-out split" if held_out else description
    match = re.fullmatch(r"""(\w+)(?:\(\s*(["'])(.*)\2\s*\))?""", description)
    if match and match[1] in CORPORA:
        return FileSource(_open_corpus(match[1], match[3] or "bpe1024", root, held_out), sequence, seed, name)
    if (match := re.fullmatch(r"synthetic\(\s*(\d{1,9})\s*\)", description)) and int(match[1]):
        return SyntheticSource(int(match[1]), seed=derive_key(seed or 0, held_out))
    path = _token_path(description, root)
    if path is None:
        raise TitanError(Diagnostic("T513", f"`{description}` does not say where the data is", nearest=DESCRIPTIONS))
    return FileSource(open_tokens(validation_path(path) if held_out else path), sequence, seed, name)


def _token_path(description: str, root: Path) -> Path | None:
    """The file of `tokens("FILE")` or of a bare path, which has a dot or a slash."""
    match = re.fullmatch(r"""tokens\(\s*(["'])(.+)\1\s*\)""", description)
    name = match[2] if match else description
    if not match and ("(" in name or not re.search(r"[./\\]", name)):
        return None
    return root / Path(name).expanduser()


def _open_corpus(name: str, tokenizer: str, root: Path, held_out: bool) -> TokenFile:
    """A shipped corpus in a named vocabulary, from the cache or made now; a damaged cache file is made anew.

    Safe for several processes at once: all write the same bytes, and files appear whole.
    """
    if tokenizer not in TOKENIZERS:
        message = f"`{name}` comes in the vocabularies {', '.join(TOKENIZERS)}, not `{tokenizer}`"
        raise TitanError(Diagnostic("T510", message, nearest=TOKENIZERS))
    shipped = hashlib.sha256((FOLDER / "bpe1024.json").read_bytes()).hexdigest() if tokenizer == "bpe1024" else ""
    key = hashlib.sha256(f"{CORPORA[name][1]} {tokenizer} {shipped} {HELD_OUT} {VERSION}".encode()).hexdigest()[:16]
    train = cache_folder(root) / f"{name}-{tokenizer}-{key}.tokens"
    wanted = validation_path(train) if held_out else train
    try:
        return open_tokens(wanted)
    except TitanError:
        texts = read_corpus(name)
        total = sum(len(text.encode("utf-8")) for text in texts)
        lines = (text.splitlines(keepends=True) for text in texts)
        prepare_texts(lines, total, train, load_tokenizer(tokenizer), HELD_OUT)
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
