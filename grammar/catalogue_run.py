"""Codes T6xx: launching and training."""

from __future__ import annotations

from titan.grammar.diagnostics import Code

ROWS: tuple[Code, ...] = ()
