"""`titan fmt`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
from titan.compiler.commands.output import print_json, say


@click.command(
    epilog="Example: titan fmt examples/*.titan     or: titan fmt --check my.titan     or: titan fmt - < my.titan"
)
@click.argument("specs", nargs=-1, required=True)
@click.option("--check", "only_check", is_flag=True, help="Change nothing; exit with 1 when a file is not formatted.")
@click.option("--json", "as_json", is_flag=True, help="Print {changed: [paths]} to stdout.")
def fmt(specs: tuple[str, ...], only_check: bool, as_json: bool) -> int:
    """Format SPECS in place; comments and blank lines stay. `-` reads stdin and writes stdout."""
    from titan.grammar.formatter import format_source
    from titan.grammar.sources import read_source

    if specs == ("-",):
        sys.stdout.write(format_source(sys.stdin.read(), "<stdin>"))
        return 0
    texts = {path: read_source(path) for path in specs}
    formatted = {path: format_source(text, path) for path, text in texts.items()}  # all are read before one is written
    changed = [path for path in texts if Path(path).read_bytes() != formatted[path].encode()]
    for path in changed:
        if not only_check:
            _replace(Path(path), formatted[path])
        say(f"{path}: {'would be reformatted' if only_check else 'formatted'}")
    if as_json:
        print_json({"changed": changed})
    return 1 if only_check and changed else 0


def _replace(path: Path, text: str) -> None:
    """The file is the old or the new one, never a part; links and permissions stay."""
    target = path.resolve()
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.write_bytes(text.encode())
        partial.chmod(target.stat().st_mode)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
