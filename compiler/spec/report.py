"""Diagnostics gathered while a spec is read, so that one run shows all of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field

from titan.compiler.plan.frozen import dataclass
from titan.grammar.diagnostics import Diagnostic, Note, Span, TitanError


class Refusal(Exception):
    """One diagnostic on its way to the report; what it interrupts counts as broken."""

    def __init__(
        self,
        code: str,
        message: str,
        span: Span | None,
        nearest: tuple[str, ...] = (),
        notes: tuple[Note, ...] = (),
        label: str = "",
    ) -> None:
        self.diagnostic = Diagnostic(code, message, span, label, nearest, notes)
        super().__init__(message)


@dataclass(slots=True)
class Report:
    """All diagnostics so far."""

    found: list[Diagnostic] = field(default_factory=list)

    def add(self, diagnostic: Diagnostic) -> None:
        if diagnostic not in self.found:
            self.found.append(diagnostic)

    def error(
        self, code: str, message: str, span: Span | None, nearest: tuple[str, ...] = (), notes: tuple[Note, ...] = ()
    ) -> None:
        self.add(Diagnostic(code, message, span, nearest=nearest, notes=notes))

    def warn(self, code: str, message: str, span: Span | None, notes: tuple[Note, ...] = ()) -> None:
        self.add(Diagnostic(code, message, span, notes=notes, severity="warning"))

    def warnings(self) -> tuple[Diagnostic, ...]:
        return tuple(in_order(d for d in self.found if d.severity == "warning"))

    def raise_errors(self) -> None:
        """Raise everything found, warnings too, when there is at least one error."""
        if any(d.severity == "error" for d in self.found):
            raise TitanError(in_order(self.found))


def in_order(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Sorted by place; what has no place comes last."""
    return sorted(diagnostics, key=_place)


def _place(diagnostic: Diagnostic) -> tuple[bool, str, int, int, str]:
    span = diagnostic.span
    if span is None:
        return (True, "", 0, 0, diagnostic.code)
    return (False, span.path, span.line, span.column, diagnostic.code)


def similar(word: str, known: Iterable[str]) -> tuple[str, ...]:
    """At most two known names that look like `word`."""
    from titan.grammar.suggestions import nearest_names

    return nearest_names(word, known, 2)
