"""Files of the language: reading one (every trouble is a coded error) and where the shipped library lies."""

from __future__ import annotations

from pathlib import Path

from titan.grammar.diagnostics import Diagnostic, Span, TitanError

LARGEST_SOURCE = 1 << 17  # bytes, and characters; 405B on 16,384 devices takes some 40 lines


def read_source(path: str | Path) -> str:
    """The text of a `.titan` file with `\\n` line ends and without byte order mark.

    Raises `TitanError`: T118 missing, T119 not a file, T120 not UTF-8, T121 larger than 128 KiB, T122 not readable.
    """
    name = str(path)
    try:
        file = Path(path)
        if not file.exists():
            raise TitanError(_missing(name, file))
        if not file.is_file():
            raise TitanError(_not_a_file(name, file))
        with file.open("rb") as stream:
            content = stream.read(LARGEST_SOURCE + 1)
            size = max(len(content), file.stat().st_size)
    except (OSError, ValueError) as trouble:
        reason = getattr(trouble, "strerror", None) or str(trouble)
        raise TitanError(Diagnostic("T122", f"{name!r} cannot be read: {reason}")) from None
    if len(content) > LARGEST_SOURCE:
        raise TitanError(Diagnostic("T121", f"{name} has {size:,} bytes and a spec has {LARGEST_SOURCE:,} at most"))
    return _decode(content, name)


def _decode(content: bytes, name: str) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as trouble:
        before = content[: trouble.start]
        line = before.count(b"\n") + 1
        column = len(before.rpartition(b"\n")[2].decode("utf-8", errors="replace")) + 1
        place = Span(name, line, column, line, column + 1)
        message = f"byte 0x{content[trouble.start]:02x} at offset {trouble.start} is not UTF-8"
        raise TitanError(Diagnostic("T120", message, place)) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _missing(name: str, file: Path) -> Diagnostic:
    from titan.grammar.suggestions import nearest_names

    folder = file.parent
    if not folder.is_dir():
        return Diagnostic("T118", f"there is no file {name}", label=f"there is no folder {folder} either")
    neighbours = sorted(entry.name for entry in folder.iterdir() if entry.is_file())[:2000]
    nearest = nearest_names(file.name, (entry for entry in neighbours if entry.endswith(".titan")), limit=3)
    return Diagnostic("T118", f"there is no file {name}", nearest=tuple(str(folder / near) for near in nearest))


def _not_a_file(name: str, file: Path) -> Diagnostic:
    if not file.is_dir():
        return Diagnostic("T119", f"{name} is not an ordinary file")
    inside = sorted(str(entry) for entry in file.iterdir() if entry.suffix == ".titan")[:3]
    return Diagnostic("T119", f"{name} is a folder, not a spec", nearest=tuple(inside))


def library_path() -> Path:
    """The folder of the shipped library; `models.llama` is `models/llama.titan` in it."""
    return Path(__file__).with_name("library")
