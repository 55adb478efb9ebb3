"""The token file: a fixed header of 256 bytes, then the tokens back to back, mapped into memory when read.

    offset  0  magic  "TITANTOK"          32  SHA-256 of the payload, 32 bytes
            8  version, u32               64  tokenizer's name, UTF-8, 64 bytes, zero-padded
           12  bytes per token, u32      128  CRC-32 of the bytes 0..127, u32
           16  vocabulary size, u64      132  zeros
           24  number of tokens, u64     256  payload: u16 or u32 per token

All numbers are little-endian. u16 serves vocabularies of up to 65,536 entries, u32 the larger ones.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import os
import struct
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from titan.grammar.diagnostics import Diagnostic, Note, TitanError

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

MAGIC = b"TITANTOK"
VERSION = 1
HEADER_BYTES = 256
FIELDS = struct.Struct("<8sIIQQ32s64s")
CHECKED_ON_OPEN = 64 * 1024 * 1024  # payload bytes below which opening also compares the hash
CHUNK = 1 << 22  # tokens held at once by a walk over the whole file
NAME_BYTES = 64


@dataclass(frozen=True, slots=True)
class TokenHeader:
    """What the first 256 bytes say; `width` is 2 or 4 bytes per token, `digest` the SHA-256 of the payload."""

    vocabulary: int
    count: int
    width: int
    digest: bytes
    tokenizer: str

    def pack(self) -> bytes:
        name = self.tokenizer.encode("utf-8")[:NAME_BYTES]
        fields = FIELDS.pack(MAGIC, VERSION, self.width, self.vocabulary, self.count, self.digest, name)
        return (fields + struct.pack("<I", zlib.crc32(fields))).ljust(HEADER_BYTES, b"\0")


@dataclass(frozen=True, slots=True)
class TokenFile:
    """An open token file. `read` touches only the pages that hold what is asked for."""

    path: Path
    header: TokenHeader
    mapped: NDArray[Any]  # [count] of u16 or u32

    def read(self, start: int, stop: int) -> NDArray[numpy.int64]:
        """Tokens start..stop-1 as int64 [stop - start]; IndexError beyond the file."""
        import numpy

        if not 0 <= start <= stop <= self.header.count:
            raise IndexError(f"tokens {start}..{stop} of a file of {self.header.count}")
        return self.mapped[start:stop].astype(numpy.int64)

    def check(self) -> None:
        """Compare the payload with the header's hash and vocabulary (T505). Reads the whole file."""
        digest = hashlib.sha256()
        largest = -1
        for chunk in self._chunks():
            digest.update(chunk.tobytes())
            largest = max(largest, int(chunk.max()))
        if digest.digest() != self.header.digest:
            found, expected = digest.hexdigest(), self.header.digest.hex()
            message = f"{self.path} is damaged: its tokens have SHA-256 {found}, the header says {expected}"
            raise TitanError(Diagnostic("T505", message))
        if largest >= self.header.vocabulary:
            message = f"{self.path} holds token {largest}, but its vocabulary has {self.header.vocabulary} entries"
            raise TitanError(Diagnostic("T505", message))

    def unigram_counts(self) -> NDArray[numpy.int64]:
        """How often each entry of the vocabulary occurs, [vocabulary]. Reads the whole file."""
        import numpy

        counts = numpy.zeros(self.header.vocabulary, dtype=numpy.int64)
        for chunk in self._chunks():
            counts += numpy.bincount(chunk, minlength=self.header.vocabulary)
        return counts

    def _chunks(self) -> Iterator[NDArray[Any]]:
        for start in range(0, self.header.count, CHUNK):
            yield self.mapped[start : start + CHUNK]


def entropy(counts: NDArray[numpy.int64]) -> float:
    """Entropy in nats of the distribution with these counts: the loss of the best guess that looks at no context."""
    shares: list[float] = (counts[counts > 0] / counts.sum()).tolist()
    return sum(-share * math.log(share) for share in shares)


def cross_entropy(counts: NDArray[numpy.int64], model: NDArray[numpy.int64]) -> float:
    """Nats per token of `counts` under the distribution of `model` with one added to each count."""
    import numpy

    log_probability = numpy.log((model + 1) / (int(model.sum()) + len(model)))
    return float(-(counts * log_probability).sum() / int(counts.sum()))


def open_tokens(path: Path, check: bool | None = None) -> TokenFile:
    """Map a token file. `check` compares the hash; by default that is done for files below 64 MiB.

    Errors: T501 missing or unreadable, T502 not a token file, T503 another version, T504 wrong length, T505 damaged.
    """
    import numpy

    try:
        with path.open("rb") as handle:
            start = handle.read(HEADER_BYTES)
            size = os.fstat(handle.fileno()).st_size
    except OSError as error:
        raise missing_file(path, error) from None
    header = _read_header(path, start, size)
    mapped = numpy.memmap(path, dtype=f"<u{header.width}", mode="r", offset=HEADER_BYTES, shape=(header.count,))
    tokens = TokenFile(path, header, mapped)
    if check or (check is None and header.count * header.width < CHECKED_ON_OPEN):
        tokens.check()
    return tokens


def missing_file(path: Path, error: OSError) -> TitanError:
    """T501 with names in the same folder that look alike."""
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        names = []
    nearest = tuple(difflib.get_close_matches(path.name, names, n=3))
    reason = "there is no such file" if isinstance(error, FileNotFoundError) else (error.strerror or str(error)).lower()
    return TitanError(Diagnostic("T501", f"{path} cannot be read: {reason}", nearest=nearest))


def _read_header(path: Path, start: bytes, size: int) -> TokenHeader:
    if len(start) < len(MAGIC) or not start.startswith(MAGIC):
        note = Note("`titan data prepare TEXT -o corpus.tokens` makes one from text files")
        message = f"{path} is not a token file: it does not start with {MAGIC.decode()}"
        raise TitanError(Diagnostic("T502", message, notes=(note,)))
    if len(start) < HEADER_BYTES:
        raise _wrong_length(path, size, f"at least {HEADER_BYTES}")
    _, version, width, vocabulary, count, digest, name = FIELDS.unpack_from(start)
    if version != VERSION:
        message = f"{path} has format version {version}, this program reads version {VERSION}"
        raise TitanError(Diagnostic("T503", message, nearest=(str(VERSION),)))
    crc = zlib.crc32(start[: FIELDS.size])
    if start[FIELDS.size :] != struct.pack("<I", crc).ljust(HEADER_BYTES - FIELDS.size, b"\0"):
        raise TitanError(Diagnostic("T505", f"the header of {path} is damaged: its checksum does not fit its content"))
    if width not in (2, 4) or not 0 < vocabulary <= 1 << 8 * width:
        message = f"the header of {path} is damaged: {width} bytes per token for a vocabulary of {vocabulary}"
        raise TitanError(Diagnostic("T505", message))
    if size != HEADER_BYTES + count * width:
        raise _wrong_length(path, size, f"{HEADER_BYTES + count * width} ({count} tokens of {width} bytes)")
    if count == 0:
        raise TitanError(Diagnostic("T509", f"{path} holds 0 tokens, at least 1 is needed"))
    return TokenHeader(vocabulary, count, width, digest, name.rstrip(b"\0").decode("utf-8", errors="replace"))


def _wrong_length(path: Path, size: int, expected: str) -> TitanError:
    return TitanError(Diagnostic("T504", f"{path} has {size} bytes, its header asks for {expected}"))


class TokenWriter:
    """Writes a token file beside its final name; only `publish` makes it appear there, complete or not at all.

    A context manager: leaving it without `publish` removes what was written. Errors: T515.
    """

    def __init__(self, path: Path, vocabulary: int, tokenizer: str) -> None:
        import numpy

        self.path = path
        self.vocabulary = vocabulary
        self.tokenizer = tokenizer
        self.counts: NDArray[numpy.int64] = numpy.zeros(vocabulary, dtype=numpy.int64)
        self._width = 2 if vocabulary <= 1 << 16 else 4
        self._digest = hashlib.sha256()
        try:
            handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
            self._file = os.fdopen(handle, "wb")
            self._temporary: Path | None = Path(name)
            self._file.write(bytes(HEADER_BYTES))
        except OSError as error:
            raise write_failure(path, error) from None

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens, each within 0..vocabulary-1 (ValueError)."""
        import numpy

        if not tokens:
            return
        array = numpy.asarray(tokens, dtype=numpy.int64)
        if array.min() < 0 or array.max() >= self.vocabulary:
            raise ValueError(f"a token outside 0..{self.vocabulary - 1}: {array.min()}..{array.max()}")
        payload = array.astype(f"<u{self._width}").tobytes()
        self.counts += numpy.bincount(array, minlength=self.vocabulary)
        self._digest.update(payload)
        try:
            self._file.write(payload)
        except OSError as error:
            raise write_failure(self.path, error) from None

    @property
    def count(self) -> int:
        return int(self.counts.sum())

    def publish(self) -> None:
        """Complete the header, flush to disk and rename to the final name."""
        assert self._temporary is not None, "a token file is published once"
        header = TokenHeader(self.vocabulary, self.count, self._width, self._digest.digest(), self.tokenizer)
        try:
            self._file.seek(0)
            self._file.write(header.pack())
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._temporary.chmod(0o644)  # mkstemp makes files that only their owner can read
            self._temporary.replace(self.path)
        except OSError as error:
            raise write_failure(self.path, error) from None
        self._temporary = None

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        try:
            self._file.close()
        except OSError as error:  # a full disk also fails the last flush
            if kind is None:
                raise write_failure(self.path, error) from None
        finally:
            if self._temporary is not None:
                self._temporary.unlink(missing_ok=True)


def write_failure(path: Path, error: OSError) -> TitanError:
    """T515: the disk refused."""
    return TitanError(Diagnostic("T515", f"{path} cannot be written: {(error.strerror or str(error)).lower()}"))
