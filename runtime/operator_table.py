"""The operators' functions by name: one module of `runtime/operators` for each row of the compiler's table."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import cast

from titan.runtime.place import OperatorModule


@cache
def functions(name: str) -> OperatorModule:
    """The module of an operator. Raises ModuleNotFoundError for a name without a file."""
    return cast(OperatorModule, import_module(f"titan.runtime.operators.{name}"))
