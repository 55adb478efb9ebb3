"""How a rank ended, and which of several ends was the first cause: that one is shown, once."""

from __future__ import annotations

import json
import os
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from titan.grammar.diagnostics import Diagnostic, Note, TitanError
from titan.runtime.drive import Aborted

# the likelier first cause first: a killed process and a failed computation explain lost connections, not the reverse
_KINDS = ("killed", "error", "lost", "aborted")


@dataclass(frozen=True, slots=True)
class Failure:
    """`kind`: killed, error, lost (a peer's connection), aborted (told to stop). `code`: of the catalogue, or empty."""

    rank: int
    kind: str
    code: str
    message: str
    place: str
    trace: str
    at: float

    @classmethod
    def of(cls, rank: int, error: BaseException, place: str) -> Failure:
        if isinstance(error, TitanError):
            first = error.diagnostics[0]
            return cls(rank, _kind(error), first.code, first.message, place, "", time.time())
        message = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        trace = "".join(traceback.format_exception(error))
        return cls(rank, "error", "", message, place, trace, time.time())

    def write(self, path: Path) -> None:
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(asdict(self)))
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> Failure:
        return cls(**json.loads(path.read_text()))


def _kind(error: TitanError) -> str:
    if isinstance(error, Aborted):
        return "aborted" if error.__cause__ is None else "lost"
    return "aborted" if error.diagnostics[0].code == "T614" else "error"


def first_failure(failures: list[Failure]) -> Failure:
    """The likeliest first cause; of several alike the earliest."""
    return min(failures, key=lambda failure: (_KINDS.index(failure.kind), failure.at))


def describe_failure(failure: Failure, all_failures: list[Failure]) -> Diagnostic:
    """One diagnostic for the whole run; an unexpected error's traceback goes to a file, or is shown in debug mode."""
    notes = [Note(f"it was at {failure.place}")]
    if failure.trace:
        notes.append(Note(_keep(failure.trace)))
    others = sorted(f.rank for f in all_failures if f.rank != failure.rank)
    if others:
        notes.append(Note(f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))} stopped after it"))
    message = f"rank {failure.rank} failed: {failure.message}"
    return Diagnostic(failure.code if failure.kind == "error" and failure.code else "T616", message, notes=tuple(notes))


def _keep(trace: str) -> str:
    if os.environ.get("TITAN_DEBUG") == "1":
        return trace
    with tempfile.NamedTemporaryFile("w", prefix="titan-report-", suffix=".txt", delete=False) as file:
        file.write(trace)
    return f"the report is in {file.name}"
