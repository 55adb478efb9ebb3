"""The way to the runtime, by name: the compiler imports none of it, and works where PyTorch is not installed."""

from __future__ import annotations

from importlib.util import find_spec

from titan.grammar.diagnostics import Diagnostic, TitanError

INSTALL = "pip install 'titan-compiler[run]'"


def require_runtime() -> None:
    """Raises T604 when PyTorch is not there; does not import it."""
    if find_spec("torch") is None:
        raise TitanError(Diagnostic("T604", "this command trains or reads data and needs PyTorch", nearest=(INSTALL,)))
