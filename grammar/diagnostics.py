"""Diagnostics: a code, a place, a sentence, the mend; and the one picture in which all of them are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Span(NamedTuple):
    """A piece of source; lines and columns count from 1, `end_column` is one past the last character."""

    path: str
    line: int
    column: int
    end_line: int
    end_column: int


class Note(NamedTuple):
    """A further fact, at another place if `span` is given."""

    text: str
    span: Span | None = None


class Diagnostic(NamedTuple):
    """One problem. `code` is a key of the catalogue; `label` stands beside the caret; `nearest` are legal values."""

    code: str
    message: str
    span: Span | None = None
    label: str = ""
    nearest: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    severity: str = "error"  # or "warning"


class Code(NamedTuple):
    """A row of the catalogue: `T` and three digits, a short title, the rule, the usual cause, an example, the cure."""

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


def render_all(error: TitanError, sources: Mapping[str, str] | None = None) -> str:
    """Every diagnostic of `error`, a blank line between two."""
    return "\n\n".join(render(diagnostic, sources) for diagnostic in error.diagnostics)


def render(diagnostic: Diagnostic, sources: Mapping[str, str] | None = None) -> str:
    """The picture: place, code and sentence; the source line with a caret; nearest legal values; notes with places.

    `sources` maps paths to texts; a path that it lacks is read from disk, and where that fails there is no source line.
    No colours, and no control characters from the source.
    """
    head = f"{diagnostic.severity} {diagnostic.code}: {_plain(diagnostic.message)}"
    lines = _draw(head, diagnostic.span, diagnostic.label, sources or {})
    if diagnostic.nearest:
        lines.append(f"  nearest legal: {', '.join(_plain(value) for value in diagnostic.nearest)}")
    for note in diagnostic.notes:
        if note.span is None:
            lines.append(f"  note: {_plain(note.text)}")
        else:
            lines += ["  " + line for line in _draw(f"note: {_plain(note.text)}", note.span, "", sources or {})]
    return "\n".join(lines)


def _draw(head: str, span: Span | None, label: str, sources: Mapping[str, str]) -> list[str]:
    if span is None:
        return [head] + ([f"  {_plain(label)}"] if label else [])
    place = f"{_plain(span.path)}:{span.line}:{span.column}: {head}"
    source = _source_line(span, sources)
    if source is None:
        return [place] + ([f"  {_plain(label)}"] if label else [])
    text, before, width = _window(source, span)
    number = f"{span.line:>4}"
    carets = " " * before + "^" * width + (f" {_plain(label)}" if label else "")
    return [place, f"{number} | {text}", f"{'':>4} | {carets}"]


def _source_line(span: Span, sources: Mapping[str, str]) -> str | None:
    source = sources.get(span.path)
    if source is None:
        try:
            with open(span.path, encoding="utf-8", errors="replace") as file:
                source = file.read(_LONGEST_SOURCE)
        except (OSError, ValueError):
            return None
    lines = source.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return lines[span.line - 1] if 0 < span.line <= len(lines) else None


_LONGEST_SOURCE = 1 << 20
_LONGEST_TEXT = 400
_WIDEST = 110  # columns of a source line; a longer one is shown around the place


def _window(source: str, span: Span) -> tuple[str, int, int]:
    """The source line made plain, the columns before the caret, and the number of carets."""
    first = min(max(span.column - 1, 0), len(source))
    last = (
        min(max(span.end_column - 1, first + 1), max(len(source), first + 1))
        if span.end_line == span.line
        else len(source)
    )
    start, end = 0, len(source)
    if end > _WIDEST:
        start = max(0, min(first - 30, end - _WIDEST))
        end = start + _WIDEST
    left, right = "..." if start else "", "..." if end < len(source) else ""
    width = _columns(source[first : min(last, end)]) + max(last - max(len(source), first), 0)
    return left + _plain(source[start:end]) + right, len(left) + _columns(source[start:first]), max(width, 1)


def _plain(text: str) -> str:
    """Tabs as four spaces, every other character that does not print as a dot; what is endless is cut in the middle."""
    text = text.replace("\t", "    ")
    text = text if len(text) <= _LONGEST_TEXT else f"{text[:200]} ... {text[-100:]}"
    return text if text.isprintable() else "".join(c if c.isprintable() else "\u00b7" for c in text)


def _columns(text: str) -> int:
    """Columns on a terminal: East Asian wide characters take two, combining ones none."""
    if text.isascii():
        return len(text) + 3 * text.count("\t")
    from unicodedata import combining, east_asian_width

    wide = sum(1 for c in text if east_asian_width(c) in "WF")
    return len(text) + 3 * text.count("\t") + wide - sum(1 for c in text if combining(c))
