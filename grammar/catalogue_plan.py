"""Codes T4xx: plan files."""

from __future__ import annotations

from titan.grammar.diagnostics import Code

ROWS: tuple[Code, ...] = ()
