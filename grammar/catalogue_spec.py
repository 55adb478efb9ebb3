"""Codes T2xx: names, values, units and legality."""

from __future__ import annotations

from titan.grammar.diagnostics import Code

ROWS: tuple[Code, ...] = ()
