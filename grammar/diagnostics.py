"""Diagnostics: a code, a place, a sentence, the mend; and the one picture in which all of them are drawn."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of source; lines and columns count from 1, `end_column` is one past the last character."""

    path: str
    line: int
    column: int
    end_line: int
    end_column: int


@dataclass(frozen=True, slots=True)
class Note:
    """A further fact, at another place if `span` is given."""

    text: str
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One problem. `code` is a key of the catalogue (`T203`); `label` stands beside the caret; `nearest` are legal values."""

    code: str
    message: str
    span: Span | None = None
    label: str = ""
    nearest: tuple[str, ...] = ()
    notes: tuple[Note, ...] = field(default=())
    severity: str = "error"  # or "warning"


@dataclass(frozen=True, slots=True)
class Code:
    """A row of the catalogue: `T` and three digits, a title of a few words, the rule, the usual cause, an example, the cure."""

    code: str
    title: str
    rule: str
    cause: str
    example: str
    cure: str


class TitanError(Exception):
    """One or more diagnostics; the command line prints them all and exits with 2 (or `exit_code`)."""

    def __init__(self, diagnostics: list[Diagnostic] | tuple[Diagnostic, ...] | Diagnostic, exit_code: int = 2) -> None:
        self.diagnostics = (diagnostics,) if isinstance(diagnostics, Diagnostic) else tuple(diagnostics)
        self.exit_code = exit_code
        super().__init__("; ".join(f"{d.code}: {d.message}" for d in self.diagnostics))
