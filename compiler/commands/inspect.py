"""`titan inspect`."""

from __future__ import annotations

import sys
from itertools import islice

import click
from titan.compiler.commands.sources import load

LINES_AT_ONCE = 2000


@click.command(epilog="Example: titan inspect llama.plan --rank 12345 | grep all_gather | head")
@click.argument("source", metavar="PLAN|SPEC")
@click.option("--rank", type=click.IntRange(min=0), help="The concrete list of this rank, peers and groups as numbers.")
@click.option("--order", default="train", show_default=True, help="`train` or `evaluate`.")
@click.option("--memory", is_flag=True, help="Bytes of each role by component, and where the peak is.")
@click.option("--text", is_flag=True, help="The plan's whole text, as the plan file holds it.")
def inspect(source: str, rank: int | None, order: str, memory: bool, text: bool) -> int:
    """Show a plan: its header, or one rank's whole list of instructions. Everything goes to stdout."""
    from titan.compiler.report.inspect import header_lines, memory_lines, rank_lines, text_lines

    plan = load(source).plan
    if rank is not None:
        lines = rank_lines(plan, rank, order)
    elif memory:
        lines = memory_lines(plan, order)
    else:
        lines = text_lines(plan) if text else header_lines(plan)
    while piece := list(islice(lines, LINES_AT_ONCE)):
        sys.stdout.write("\n".join(piece) + "\n")
    return 0
