"""`titan data prepare`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import click
from titan.compiler.commands.runtime import require_runtime


@click.group()
def data() -> None:
    """Token files for training, made from text files."""


@data.command(epilog="Example: titan data prepare book1.txt book2.txt -o corpus.tokens --validation 0.1")
@click.argument("texts", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The token file to write.")
@click.option("--tokenizer", default="bpe1024", show_default=True, help="bpe1024, byte, gpt2 or a tokenizer.json file.")
@click.option("--validation", default=0.0, show_default=True, help="Share of the text, at its end, that is held out.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as one object to stdout.")
def prepare(texts: tuple[Path, ...], output: Path, tokenizer: str, validation: float, as_json: bool) -> int:
    """Tokenise UTF-8 TEXTS, in the order given, into one token file and its held-out split."""
    require_runtime()
    module = import_module("titan.runtime.prepare")
    arguments = module.PrepareArguments(texts, output, tokenizer, validation, as_json)
    code: int = module.prepare_command(arguments)
    return code
