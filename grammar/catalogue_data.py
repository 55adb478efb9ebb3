"""Codes T5xx: training data and tokenizers."""

from __future__ import annotations

from titan.grammar.diagnostics import Code

ROWS: tuple[Code, ...] = ()
