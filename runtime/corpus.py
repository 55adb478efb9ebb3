"""The shipped corpora: texts that come with the package, so that the first training run needs no download."""

from __future__ import annotations

import hashlib
import lzma
from pathlib import Path

from titan.grammar.diagnostics import Diagnostic, TitanError

WORK_SEPARATOR = "\f"  # between two works of one corpus; no work contains it
SHAKESPEARE_SHA256 = "4ea31573b537e8d007c358af8371396942a00278301f3182cdf0e132f1a95737"
CORPORA = {"shakespeare": ("shakespeare.txt.xz", SHAKESPEARE_SHA256)}  # name -> file, SHA-256 of the unpacked text
FOLDER = Path(__file__).parent / "corpora"


def read_corpus(name: str) -> tuple[str, ...]:
    """The works of a shipped corpus (a key of `CORPORA`), in a fixed order.

    Errors: T505 when the shipped file is missing, damaged or changed.
    """
    file, expected = CORPORA[name]
    path = FOLDER / file
    try:
        payload = lzma.decompress(path.read_bytes())
    except (OSError, lzma.LZMAError) as error:
        raise TitanError(Diagnostic("T505", f"the shipped corpus {path} cannot be unpacked: {error}")) from None
    found = hashlib.sha256(payload).hexdigest()
    if found != expected:
        message = f"the shipped corpus {path} is damaged: its text has SHA-256 {found}, expected {expected}"
        raise TitanError(Diagnostic("T505", message))
    return tuple(payload.decode("utf-8").split(WORK_SEPARATOR))
