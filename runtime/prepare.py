"""`titan data prepare`: text files to token files, in one pass, with memory for one piece of text at a time."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from titan.grammar.diagnostics import Diagnostic, Note, TitanError
from titan.runtime.tokenfile import TokenWriter, cross_entropy, entropy, missing_file
from titan.runtime.tokenizer import Tokenizer, load_tokenizer

PIECE_BYTES = 1 << 18  # text encoded at once
Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True, slots=True)
class Split:
    """What one token file holds: bytes of text, tokens, entropy of its own unigram distribution (nats per token)."""

    path: str
    text_bytes: int
    tokens: int
    unigram_entropy: float


@dataclass(frozen=True, slots=True)
class Prepared:
    """The result; `train_unigram_loss` is the validation split's nats per token under the training counts plus one."""

    tokenizer: str
    vocabulary: int
    end_of_text: int | None
    train: Split
    validation: Split | None
    train_unigram_loss: float | None


@dataclass(frozen=True, slots=True)
class PrepareArguments:
    """What the command line hands over."""

    paths: tuple[Path, ...]
    output: Path
    tokenizer: str = "bpe1024"
    validation: float = 0.0
    json: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of one text that is encoded on its own; `size` in bytes of UTF-8."""

    text: str
    size: int
    held_out: bool
    ends_text: bool


def validation_path(output: Path) -> Path:
    """Where the held-out split of `corpus.tokens` lies: `corpus.validation.tokens`."""
    return output.with_name(f"{output.stem}.validation{output.suffix}")


def prepare(
    paths: Sequence[Path],
    output: Path,
    tokenizer: str = "bpe1024",
    validation_fraction: float = 0.0,
    progress: Progress | None = None,
) -> Prepared:
    """Tokenise UTF-8 text files, in the order given, into `output` and, if asked, its validation file.

    The held-out split is the last part of the whole text, cut at a line break; each text is followed by the
    vocabulary's end-of-text token, if it has one. Nothing appears under the final names unless all went well.
    Errors: T501, T509 to T512, T514, T515.
    """
    reader = load_tokenizer(tokenizer)
    sizes = [_size(path) for path in paths]
    _check_output(paths, output, validation_fraction)
    texts = [_lines(path) for path in paths]
    return prepare_texts(texts, sum(sizes), output, reader, validation_fraction, progress)


def prepare_texts(
    texts: Iterable[Iterable[str]],
    total_bytes: int,
    output: Path,
    tokenizer: Tokenizer,
    validation_fraction: float = 0.0,
    progress: Progress | None = None,
) -> Prepared:
    """As `prepare`, for texts given as iterables of lines, of `total_bytes` bytes of UTF-8 together."""
    _check_fraction(validation_fraction)
    cut = total_bytes - int(total_bytes * validation_fraction) if validation_fraction else None
    outputs = [output] if cut is None else [output, validation_path(output)]
    text_bytes = [0, 0]
    with ExitStack() as stack:
        writers = [stack.enter_context(TokenWriter(path, tokenizer.vocabulary, tokenizer.name)) for path in outputs]
        for piece in _pieces(texts, cut):
            writer = writers[piece.held_out]
            writer.append(tokenizer.encode(piece.text))
            if piece.ends_text and tokenizer.end_of_text is not None:
                writer.append((tokenizer.end_of_text,))
            text_bytes[piece.held_out] += piece.size
            if progress is not None:
                progress(sum(text_bytes), total_bytes)
        _check_filled(writers, validation_fraction)
        for writer in reversed(writers):  # the training file last: where it stands, its validation file stands too
            writer.publish()
        return _report(writers, text_bytes, tokenizer)


def _report(writers: list[TokenWriter], text_bytes: list[int], tokenizer: Tokenizer) -> Prepared:
    splits = [Split(str(w.path), size, w.count, entropy(w.counts)) for w, size in zip(writers, text_bytes)]
    held_out = splits[1] if len(splits) > 1 else None
    loss = cross_entropy(writers[1].counts, writers[0].counts) if held_out else None
    return Prepared(tokenizer.name, tokenizer.vocabulary, tokenizer.end_of_text, splits[0], held_out, loss)


def _pieces(texts: Iterable[Iterable[str]], cut: int | None) -> Iterator[Piece]:
    """Cut texts to pieces of about `PIECE_BYTES`; what starts after `cut` bytes is held out.

    A cut lies before a line break that a word follows. There byte-level tokenizers in the manner of GPT-2 break words
    anyway, so the tokens are those of the whole text.
    """
    done = 0
    for text in texts:
        lines: list[str] = []
        size = 0
        for line in text:
            goal = PIECE_BYTES if cut is None or done >= cut else min(PIECE_BYTES, cut - done)
            if size >= goal and lines[-1].endswith("\n") and not line[0].isspace():
                yield Piece("".join(lines)[:-1], size - 1, cut is not None and done >= cut, False)
                done += size - 1
                lines, size = ["\n"], 1
            lines.append(line)
            size += len(line) if line.isascii() else len(line.encode("utf-8"))
        if lines:
            yield Piece("".join(lines), size, cut is not None and done >= cut, True)
        done += size


def _lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file with their endings as they are; T512 names the byte that is not UTF-8."""
    offset = 0
    try:
        with path.open("rb") as handle:
            for raw in handle:
                yield raw.decode("utf-8")
                offset += len(raw)
    except UnicodeDecodeError as error:
        place = offset + error.start
        message = f"{path} is not UTF-8 text: byte {place} is {error.object[error.start]:#04x} ({error.reason})"
        raise TitanError(Diagnostic("T512", message)) from None
    except OSError as error:
        raise missing_file(path, error) from None


def _size(path: Path) -> int:
    try:
        with path.open("rb"):
            size = path.stat().st_size
    except OSError as error:
        raise missing_file(path, error) from None
    if size == 0:
        raise TitanError(Diagnostic("T509", f"{path} is empty: 0 bytes, at least 1 is needed"))
    return size


def _check_fraction(fraction: float) -> None:
    if not 0 <= fraction < 1:
        message = f"validation = {fraction:g} is not a fraction of the text: 0 <= validation < 1"
        raise TitanError(Diagnostic("T514", message, nearest=("0", "0.1")))


def _check_filled(writers: list[TokenWriter], fraction: float) -> None:
    for writer, what in zip(writers, ("training", "validation")):
        if writer.count == 0:
            if len(writers) == 1:
                raise TitanError(Diagnostic("T509", "the texts hold 0 tokens, at least 1 is needed"))
            message = f"validation = {fraction:g} leaves 0 tokens for the {what} split: the text is too short to be cut"
            raise TitanError(Diagnostic("T514", message, notes=(Note("texts are cut at line breaks"),)))


def _check_output(paths: Sequence[Path], output: Path, fraction: float) -> None:
    """Refuse to overwrite an input, and to leave an older validation file beside a new training file."""
    if not paths:
        raise TitanError(Diagnostic("T509", "0 text files are given, at least 1 is needed"))
    held_out = validation_path(output)
    for path in paths:
        if path.resolve() in (output.resolve(), held_out.resolve()):
            raise TitanError(Diagnostic("T515", f"{path} is a text to read and also the file to write"))
    if output.is_dir():
        raise TitanError(Diagnostic("T515", f"{output} cannot be written: it is a folder"))
    if not fraction and held_out.exists():
        message = f"{held_out} belongs to an earlier preparation and would be taken for the held-out split of {output}"
        notes = (Note("delete it, or ask for a new one with --validation 0.1"),)
        raise TitanError(Diagnostic("T515", message, notes=notes))


def prepare_command(arguments: PrepareArguments) -> int:
    """Run `prepare`, report to stderr and, if asked, as one JSON object to stdout. Exit code 0; errors as `prepare`."""
    shown = _show_progress if sys.stderr.isatty() else None
    result = prepare(arguments.paths, arguments.output, arguments.tokenizer, arguments.validation, shown)
    for line in describe(result):
        print(line, file=sys.stderr)
    if arguments.json:
        print(json.dumps(asdict(result)))
    return 0


def describe(result: Prepared) -> Iterator[str]:
    """The report in lines for people."""
    yield f"tokenizer   {result.tokenizer}, {result.vocabulary:,} entries"
    named = (("train", result.train), ("validation", result.validation))
    for name, split in named:
        if split is not None:
            rate = split.text_bytes / split.tokens
            yield f"{name:<11} {split.path}: {split.tokens:,} tokens, {rate:.2f} bytes per token"
            yield f"            unigram entropy of this split {split.unigram_entropy:.3f} nats"
    if result.train_unigram_loss is not None:
        loss = f"{result.train_unigram_loss:.3f} nats"
        yield f"            unigram loss of the validation split under the training counts (plus one) {loss}"


def _show_progress(done: int, total: int) -> None:
    end = "\n" if done >= total else ""
    print(f"\r{done / total:4.0%} of {total / 1e6:.1f} MB", end=end, file=sys.stderr, flush=True)
