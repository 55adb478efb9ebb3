"""`titan check`."""

from __future__ import annotations

import click
from titan.compiler.commands.output import diagnostics_json, print_json, say, show
from titan.grammar.diagnostics import TitanError


@click.command(epilog="Example: titan check examples/quickstart.titan")
@click.argument("spec")
@click.option("--json", "as_json", is_flag=True, help="Print {ok, diagnostics} to stdout.")
def check(spec: str, as_json: bool) -> int:
    """Parse and resolve SPEC and test every rule that needs no search. All errors are shown at once."""
    from titan.compiler.spec.pins import check_pins
    from titan.compiler.spec.resolve import load_spec

    found = load_spec(spec)
    diagnostics = (*found.warnings, *check_pins(found))
    if any(d.severity == "error" for d in diagnostics):
        raise TitanError(diagnostics)
    show(diagnostics)
    if as_json:
        print_json({"ok": True, "diagnostics": diagnostics_json(diagnostics)})
    else:
        devices = f"{found.cluster.world_size:,} devices"
        say(f"{spec}: {found.model.name} on {devices}, no errors{_warnings(len(diagnostics))}")
    return 0


def _warnings(count: int) -> str:
    return f", {count} warning{'s' if count > 1 else ''}" if count else ""
