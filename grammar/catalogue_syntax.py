"""Codes T1xx: text that is not a spec, numbers and units, files that cannot be read."""

from __future__ import annotations

from titan.grammar.diagnostics import Code

ROWS: tuple[Code, ...] = ()
