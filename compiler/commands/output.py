"""What commands share when they print or write: JSON on stdout, pictures of warnings on stderr, files."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from titan.grammar.diagnostics import Diagnostic, Span, TitanError, render_all


def print_json(value: Any) -> None:
    """One object on one line of stdout."""
    print(json.dumps(value, allow_nan=False))


def say(text: str = "") -> None:
    """A line for people."""
    print(text, file=sys.stderr)


def write_text(path: Path, text: str) -> None:
    """Some folders, such as those of the kernel, refuse only when they are written to. Errors: T603."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TitanError(Diagnostic("T603", f"{path} cannot be written: {error.strerror}")) from None


def show(diagnostics: Iterable[Diagnostic]) -> None:
    """The pictures of diagnostics, to stderr."""
    found = tuple(diagnostics)
    if found:
        say(render_all(TitanError(found)))


def diagnostics_json(diagnostics: Iterable[Diagnostic]) -> list[dict[str, Any]]:
    """Code, severity, message, place, label, nearest legal values and notes of each."""
    return [
        {
            "code": d.code,
            "severity": d.severity,
            "message": d.message,
            **_place(d.span),
            "label": d.label,
            "nearest": list(d.nearest),
            "notes": [{"text": n.text, **_place(n.span)} for n in d.notes],
        }
        for d in diagnostics
    ]


def _place(span: Span | None) -> dict[str, Any]:
    if span is None:
        return {"path": None, "line": None, "column": None}
    return {"path": span.path, "line": span.line, "column": span.column}


def si(value: float, unit: str = "") -> str:
    """`1.23 G` and the like: three digits with a decimal prefix."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def binary(size: int) -> str:
    """Bytes with a binary prefix: `1.50 GiB`."""
    for factor, prefix in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(size) >= factor:
            return f"{size / factor:.2f} {prefix}"
    return f"{size} B"
