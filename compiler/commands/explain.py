"""`titan explain`: the reasons of a plan, or the long text of a code."""

from __future__ import annotations

import re

import click
from titan.compiler.commands.output import print_json
from titan.grammar.diagnostics import Diagnostic, TitanError


@click.command(epilog="Example: titan explain T203     or: titan explain llama.titan --why-not tensor=4")
@click.argument("subject", metavar="SPEC|PLAN|CODE")
@click.option("--why-not", help="Why another choice was not taken: `tensor=8`.")
@click.option("--json", "as_json", is_flag=True, help="Print one object to stdout.")
def explain(subject: str, why_not: str | None, as_json: bool) -> int:
    """Each choice of a plan with the number that decided it; or what a diagnostic's code means and how to mend it."""
    if re.fullmatch(r"[Tt]\d{3}", subject):
        return _explain_code(subject.upper(), as_json)
    from titan.compiler.commands.sources import load
    from titan.compiler.report.explain import explain_lines, explain_why_not

    source = load(subject)
    if why_not is None:
        lines = list(explain_lines(source.plan, source.compiled.result if source.compiled else None))
    elif source.compiled is None:
        message = "a plan holds only what was chosen; another choice is priced from the spec"
        raise TitanError(Diagnostic("T605", message, nearest=(f"titan explain SPEC --why-not {why_not}",)))
    else:
        lines = list(explain_why_not(source.compiled.spec, source.compiled.result, why_not))
    if as_json:
        print_json({"lines": lines})
    else:
        print("\n".join(lines))
    return 0


def _explain_code(code: str, as_json: bool) -> int:
    from titan.grammar.catalogue import CATALOGUE

    row = CATALOGUE.get(code)
    if row is None:
        from titan.grammar.suggestions import nearest_names

        near = nearest_names(code, CATALOGUE, 3)
        raise TitanError(Diagnostic("T601", f"there is no code {code}", nearest=near))
    if as_json:
        print_json({name: getattr(row, name) for name in ("code", "title", "rule", "cause", "example", "cure")})
        return 0
    print(f"{row.code}: {row.title}\n")
    for name in ("rule", "cause", "example", "cure"):
        text = getattr(row, name).replace("\n", "\n" + " " * 10)
        print(f"{name:<9} {text}")
    return 0
