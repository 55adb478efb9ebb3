"""`titan verify`: the proofs, and on request a small run of the same structure against plain autograd."""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click
from titan.compiler.commands.output import print_json, say, show
from titan.compiler.commands.runtime import require_runtime
from titan.compiler.commands.sources import Source, load
from titan.grammar.diagnostics import Diagnostic, Note, TitanError

if TYPE_CHECKING:
    from titan.compiler.verify.findings import Finding, Proof

MOST_FINDINGS = 20  # that are drawn; JSON has all that the proofs report


@click.command(epilog="Example: titan verify llama.plan     or: titan verify examples/quickstart.titan --execute")
@click.argument("source", metavar="SPEC|PLAN")
@click.option("--execute", is_flag=True, help="Shrink the model, run all ranks here, compare with one process (SPEC).")
@click.option("--json", "as_json", is_flag=True, help="Print {proof: {ok, seconds, findings}} to stdout.")
def verify(source: str, execute: bool, as_json: bool) -> int:
    """Prove that a plan cannot deadlock, mixes nothing up, counts everything once and fits into memory."""
    from titan.compiler.verify.proofs import verify as prove

    if execute:
        require_runtime()
    found = load(source)
    proofs = prove(found.plan)
    results = {name: _result(proof) for name, proof in proofs.items()}
    proved = all(proof.ok for proof in proofs.values())
    if execute and proved:
        results["execute"] = execute_small(found)
    for name, result in results.items():
        say(f"{name:<12} {'ok' if result['ok'] else 'FAILED':<7} {result['seconds']:8.3f} s")
    show(findings(proofs))
    for text in results.get("execute", {}).get("findings", ()):
        say(f"  {text}")
    if as_json:
        print_json(results)
    if not proved:
        return 2
    return 0 if all(result["ok"] for result in results.values()) else 1


def _result(proof: Proof) -> dict[str, Any]:
    return {"ok": proof.ok, "seconds": round(proof.seconds, 6), "findings": [str(f) for f in proof.findings]}


def findings(proofs: Mapping[str, Proof]) -> tuple[Diagnostic, ...]:
    """The first findings of all proofs as diagnostics."""
    every = [finding for proof in proofs.values() for finding in proof.findings]
    shown = tuple(_diagnostic(finding) for finding in every[:MOST_FINDINGS])
    if len(every) > MOST_FINDINGS:
        more = Note(f"and {len(every) - MOST_FINDINGS} more findings")
        last = shown[-1]
        return (*shown[:-1], Diagnostic(last.code, last.message, label=last.label, notes=(*last.notes, more)))
    return shown


def _diagnostic(finding: Finding) -> Diagnostic:
    label = f"{finding.index}: {finding.instruction}" if finding.index >= 0 else ""
    where = f"role {finding.role}" if finding.role >= 0 else "plan"
    where += f", block {finding.block}" if finding.block else ""
    where += f", call {finding.call} of the order" if finding.call >= 0 else ""
    return Diagnostic(finding.code, f"{where}: {finding.message}", label=label)


def execute_small(source: Source) -> dict[str, Any]:
    """The shrunk plan on the loopback transport in float64 against plain autograd; as one more proof's result."""
    from titan.compiler.lower import lower
    from titan.compiler.shrink import shrink

    compiled = source.compiled
    if compiled is None:
        message = "--execute shrinks the model and compiles it again, for which it needs the spec"
        raise TitanError(Diagnostic("T605", message, nearest=("titan verify SPEC --execute",)))
    start = time.perf_counter()
    strategy = compiled.result.strategy
    small = lower(*shrink(compiled.spec, strategy))
    comparisons = import_module("titan.runtime.execute").execute_and_compare(small)
    wrong = [str(comparison) for comparison in comparisons if not comparison.ok]
    say(f"execute: {len(comparisons)} values compared on {small.mesh.world_size} ranks")
    return {"ok": not wrong, "seconds": round(time.perf_counter() - start, 6), "findings": wrong}
