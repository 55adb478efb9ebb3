"""`titan diff`."""

from __future__ import annotations

import click
from titan.compiler.commands.output import print_json
from titan.compiler.commands.sources import load


@click.command(epilog="Example: titan diff before.plan after.plan")
@click.argument("first", metavar="SPEC|PLAN")
@click.argument("second", metavar="SPEC|PLAN")
@click.option("--json", "as_json", is_flag=True, help="Print {equal, differences} to stdout.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 when the plans differ.")
def diff(first: str, second: str, as_json: bool, exit_code: bool) -> int:
    """What differs between two plans: settings, mesh, layouts, programs, memory, traffic and predicted time."""
    from titan.compiler.report.diff import compare

    found = compare(load(first).plan, load(second).plan)
    if as_json:
        print_json({"equal": not found, "differences": [difference.as_dict() for difference in found]})
    else:
        print("\n".join(map(str, found)) if found else "the plans are equal")
    return 1 if exit_code and found else 0
