"""A command's SPEC or PLAN argument, and plan files with every trouble as a coded error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan.compiler.plan.frozen import dataclass
from titan.grammar.diagnostics import Diagnostic, TitanError

if TYPE_CHECKING:
    from titan.compiler.pipeline import Compiled
    from titan.compiler.plan.program import Plan

GZIP = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Source:
    """A plan and, when it was made from a spec, all that compiling found."""

    plan: Plan
    compiled: Compiled | None


def is_plan_file(path: str) -> bool:
    """By its first bytes; anything else is taken for a spec."""
    try:
        with open(path, "rb") as stream:
            return stream.read(2) == GZIP
    except (OSError, ValueError):
        return path.endswith((".plan", ".tplan"))


def load(path: str) -> Source:
    """Reads a plan file, or compiles a spec."""
    if is_plan_file(path):
        return Source(load_plan_file(path), None)
    from titan.compiler.pipeline import compile_spec

    compiled = compile_spec(path)
    return Source(compiled.plan, compiled)


def load_plan_file(path: str) -> Plan:
    """The plan of a file. Errors: T401 to T406, T602."""
    from titan.compiler.plan.file import PlanFileError, read_plan

    try:
        return read_plan(path)
    except PlanFileError as error:
        raise TitanError(_diagnostic(path, error)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TitanError(Diagnostic("T602", f"{path!r} cannot be read: {reason}")) from None


def _diagnostic(path: str, error: Exception) -> Diagnostic:
    """The place of an error inside a plan is a line of its text, which `titan inspect` shows."""
    line = getattr(error, "line", None)
    place = f", line {line} of its text" if line else ""
    return Diagnostic(getattr(error, "code", "T403"), f"{path}{place}: {getattr(error, 'message', error)}")
