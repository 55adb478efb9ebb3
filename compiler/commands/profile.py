"""`titan profile`."""

from __future__ import annotations

import os
import sys
import time
from importlib import import_module
from pathlib import Path

import click
from titan.compiler.commands.output import print_json, say, write_text
from titan.compiler.commands.runtime import require_runtime
from titan.grammar.diagnostics import Diagnostic, TitanError

WIDTH = 24


@click.command(epilog="Example: titan profile -o machine.titan     then, in a spec beside it: import machine")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("cluster.titan"),
    show_default=True,
    help="The cluster file to write.",
)
@click.option(
    "--ranks",
    type=click.IntRange(min=1, max=64),
    help="Local ranks that a run will have: groups up to this size are measured.  [default: 4; on GPUs all of them]",
)
@click.option(
    "--device",
    type=click.Choice(("auto", "cpu", "cuda")),
    default="auto",
    show_default=True,
    help="What ranks compute on.",
)
@click.option("--quick", is_flag=True, help="A few seconds, few sizes: to see that it works.")
@click.option("--json", "as_json", is_flag=True, help="Print what was measured as one object to stdout.")
def profile(output: Path, ranks: int | None, device: str, quick: bool, as_json: bool) -> int:
    """Measure this machine within two minutes and write it as a cluster that specs can import.

    Let nothing else run meanwhile. Ctrl-C ends it and writes nothing.
    """
    require_runtime()
    _check(output)
    measure = import_module("titan.compiler.profile.measure")
    write = import_module("titan.compiler.profile.write")
    session = import_module("titan.runtime.profile.session")
    started = time.perf_counter()
    progress = Progress()
    try:
        with session.Session(ranks or session.usual_ranks(device), device) as opened:
            found = measure.measure(opened, progress.show, quick)
    finally:
        progress.end()
    from datetime import date

    text = write.cluster_text(found, output.stem, date.today())
    write_text(output, text)
    seconds = time.perf_counter() - started
    if found.left_out:
        say(f"for want of time left out, so that larger ones are extrapolated: {'; '.join(found.left_out)}")
    say(f"wrote {output} in {seconds:.0f} s; specs beside it `import {output.stem}`: `cluster = {output.stem}.here`")
    if as_json:
        print_json(
            {
                "output": str(output),
                "seconds": seconds,
                "ranks": found.ranks,
                "cores": found.cores,
                "device": found.device,
                "peak_flops": found.peaks,
                "memory_bandwidth": found.stream,
                "figures": found.figures,
                "curves": len(found.curves),
                "left_out": found.left_out,
            }
        )
    return 0


class Progress:
    """One line that is drawn again on a terminal; elsewhere a line every ten seconds."""

    def __init__(self) -> None:
        self._terminal, self._shown = sys.stderr.isatty(), -10.0

    def show(self, share: float, what: str) -> None:
        if self._terminal:
            bar = "#" * round(WIDTH * share)
            sys.stderr.write(f"\r\033[K[{bar:<{WIDTH}}] {share:4.0%}  {what[:50]}")
            sys.stderr.flush()
        elif time.monotonic() - self._shown >= 10:
            self._shown = time.monotonic()
            say(f"{share:4.0%}  {what}")

    def end(self) -> None:
        if self._terminal:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


def _check(output: Path) -> None:
    """Before anything is measured, not after. Errors: T603."""
    name = output.stem
    if output.suffix != ".titan" or not name.isidentifier():
        message = f"{output.name} cannot be imported by a spec: it needs a plain name and `.titan`"
        raise TitanError(Diagnostic("T603", message, nearest=("cluster.titan",)))
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise TitanError(Diagnostic("T603", f"{output} cannot be written: there is no folder {output.parent}"))
    if not os.access(output if output.exists() else output.absolute().parent, os.W_OK):
        raise TitanError(Diagnostic("T603", f"{output} cannot be written: no right to write there"))
