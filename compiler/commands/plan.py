"""`titan plan`."""

from __future__ import annotations

from pathlib import Path

import click
from titan.compiler.commands.output import print_json, say, show
from titan.compiler.garbage import rare_collections
from titan.grammar.diagnostics import Diagnostic, TitanError


@click.command(epilog="Example: titan plan examples/llama3_70b_1024gpu.titan -o llama.plan")
@click.argument("spec")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the plan to this file.")
@click.option("--pareto", is_flag=True, help="Print the plans that trade devices, step time and memory instead.")
@click.option("--json", "as_json", is_flag=True, help="Print the prediction as one object to stdout.")
@rare_collections()
def plan(spec: str, output: Path | None, pareto: bool, as_json: bool) -> int:
    """Search for the best plan of SPEC, compile, prove and price it, and print its summary."""
    from titan.compiler.pipeline import compile_and_prove
    from titan.compiler.report.summary import plan_json, print_proofs, print_summary

    if pareto:
        return _trade_offs(spec, output, as_json)
    if output is not None:
        _check_place(output)
    if as_json:
        compiled, proofs = compile_and_prove(spec)
        print_json(plan_json(compiled.spec, compiled.result, proofs))
    else:
        compiled, proofs = compile_and_prove(spec, lambda found: print_summary(found.spec, found.result))
        print_proofs(compiled.plan, proofs)
    if not all(proof.ok for proof in proofs.values()):
        from titan.compiler.commands.verify import findings

        show(findings(proofs))
        return 1
    if output is not None:
        from titan.compiler.plan.file import write_plan

        say(f"wrote {output} (sha256 {write_plan(compiled.plan, output)[:16]})")
    return 0


def _trade_offs(spec: str, output: Path | None, as_json: bool) -> int:
    """The table of plans of which none is better in everything."""
    from titan.compiler.pipeline import check_spec
    from titan.compiler.report.trade_offs import print_trade_offs, trade_offs_json
    from titan.compiler.search.trade_offs import trade_offs

    if output is not None:
        message = (
            "--pareto shows many plans and writes none: leave -o out, or write one with its limits in the objective"
        )
        raise TitanError(Diagnostic("T601", message))
    choices = trade_offs(check_spec(spec))
    if as_json:
        print_json(trade_offs_json(choices))
    else:
        print_trade_offs(choices)
    return 0


def _check_place(output: Path) -> None:
    """Before the search, not after it."""
    if output.is_dir():
        raise TitanError(
            Diagnostic("T603", f"{output} is a folder; the plan needs a file", nearest=(f"{output}/my.plan",))
        )
    if not output.absolute().parent.is_dir():
        raise TitanError(Diagnostic("T603", f"{output} cannot be written: there is no folder {output.parent}"))
