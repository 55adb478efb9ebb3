"""`titan passes`."""

from __future__ import annotations

import click
from titan.compiler.commands.output import print_json


@click.command(epilog="Example: titan passes")
@click.option("--json", "as_json", is_flag=True, help="Print [{name, does}] to stdout.")
def passes(as_json: bool) -> int:
    """The passes over the model graph, in their order, each with what it does."""
    from titan.compiler.passes.registry import GRAPH_PASSES

    rows = [(step.__name__, _first_line(step.__doc__)) for step in GRAPH_PASSES]
    if as_json:
        print_json([{"name": name, "does": does} for name, does in rows])
    else:
        print("\n".join(f"{number}  {name:<12} {does}" for number, (name, does) in enumerate(rows, 1)))
    return 0


def _first_line(text: str | None) -> str:
    return " ".join((text or "").split("\n\n")[0].split())
