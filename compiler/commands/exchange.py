"""`titan export` and `titan import`: what other tools read and write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from titan.compiler.commands.output import print_json, say, write_text
from titan.grammar.diagnostics import Diagnostic, TitanError

FORMATS = ("pipeline-csv",)


@click.command(name="export", epilog="Example: titan export pipeline-csv my.titan -o order.csv")
@click.argument("form", metavar="FORMAT", type=click.Choice(FORMATS))
@click.argument("source", metavar="SPEC|PLAN")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write to this file instead of stdout.")
def export(form: str, source: str, output: Path | None) -> int:
    """Write the order of a plan's pipeline as PyTorch's table of actions (FORMAT pipeline-csv): a row per pipeline
    rank, cells such as 0F3, 1B2, 0I1, 0W1."""
    from titan.compiler.commands.sources import load
    from titan.compiler.formats.pipeline_csv import order_of, write_order

    text = write_order(order_of(load(source).plan))
    if output is None:
        click.echo(text, nl=False)
        return 0
    write_text(output, text)
    say(f"wrote {output}")
    return 0


@click.command(name="import", epilog="Example: titan import pipeline-csv order.csv")
@click.argument("form", metavar="FORMAT", type=click.Choice(FORMATS))
@click.argument("source", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one object to stdout.")
def import_(form: str, source: Path, as_json: bool) -> int:
    """Read PyTorch's table of pipeline actions (FORMAT pipeline-csv), check that it can run to its end, and say what it
    is and how a spec uses it."""
    figures = _figures(source)
    if as_json:
        print_json(figures)
        return 0
    bubble, span = figures["flush_bubble"], figures["span_bubble"]
    say(f"{figures['ranks']} ranks, {figures['stages']} stages, {figures['micro_batches']} micro-batches")
    say(f"with F = I = W: bubble {bubble:.1%} of the step (flush), {span:.1%} within the ranks' own spans")
    say(f"most micro-batches kept, of a rank's whole share: {', '.join(f'{n:g}' for n in figures['frames'])}")
    say(f'in a spec beside it:  parallel {{ schedule = "{source.name}" }}')
    return 0


def _figures(source: Path) -> dict[str, Any]:
    """Size and idle shares in unit times. Errors: T410, T602."""
    from titan.compiler.formats.pipeline_csv import read_order
    from titan.compiler.schedules.timetable import Durations, peak_frames, timetable

    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise TitanError(Diagnostic("T602", f"{str(source)!r} cannot be read: {reason}")) from None
    order = read_order(text, str(source))
    found = timetable(order, Durations.unit(len(order.placement)))
    ranks = len(order.ranks)
    spans = [found.span_bubble(rank) for rank in range(ranks)]
    return {
        "ranks": ranks,
        "stages": len(order.placement),
        "micro_batches": 1 + max(element.micro_batch for element in order.elements(0)),
        "flush_bubble": found.flush_bubble,
        "span_bubble": sum(spans) / ranks,
        "frames": list(peak_frames(order)),
    }
