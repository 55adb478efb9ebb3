"""Source -> Plan, each stage by name; one can stop after any of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from titan.compiler.garbage import rare_collections
from titan.compiler.plan.frozen import dataclass

if TYPE_CHECKING:
    from titan.compiler.plan.program import Plan
    from titan.compiler.search.search import SearchResult
    from titan.compiler.spec.schema import Spec
    from titan.compiler.verify.findings import Proof


@dataclass(frozen=True)
class Compiled:
    """What a spec became: the search's choice with its plan, proofs not yet run. `spec` is the plan's, whose cluster
    is the part of the user's that is used."""

    spec: Spec
    result: SearchResult

    @property
    def plan(self) -> Plan:
        return self.result.plan


def check_spec(path: str | Path) -> Spec:
    """Parse, resolve and check the user's pins; warnings are added to the spec's. Raises TitanError with every problem
    found."""
    from titan.compiler.spec.legality import check_pins
    from titan.compiler.spec.resolve import load_spec
    from titan.grammar.diagnostics import TitanError

    spec = load_spec(path)
    found = check_pins(spec)
    if any(problem.severity == "error" for problem in found):
        raise TitanError(found)
    return replace(spec, warnings=(*spec.warnings, *found)) if found else spec


@rare_collections()
def compile_spec(path: str | Path) -> Compiled:
    """check, search, lower: the best plan found. Raises TitanError (exit code 3 when nothing fits)."""
    from titan.compiler.search.goal import best

    found = best(check_spec(path))
    return Compiled(found.spec, found.result)


@rare_collections()
def compile_and_prove(
    path: str | Path, meanwhile: Callable[[Compiled], None] = lambda compiled: None
) -> tuple[Compiled, dict[str, Proof]]:
    """`compile_spec`, and the proofs of its plan, begun while the search still times it; `meanwhile` is what else there
    is to do with the plan, before its proofs are known. Raises TitanError."""
    from titan.compiler.search.goal import best
    from titan.compiler.verify.early import EarlyProofs

    with EarlyProofs() as early:
        found = best(check_spec(path), early.begin)
        compiled = Compiled(found.spec, found.result)
        early.begin(compiled.plan)
        meanwhile(compiled)
        return compiled, early.proofs(compiled.plan)
