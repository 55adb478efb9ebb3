"""Codes T3xx: memory, and specs that no plan fits."""

from __future__ import annotations

from titan.grammar.diagnostics import Code

ROWS: tuple[Code, ...] = ()
