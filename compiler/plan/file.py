"""The plan file: the plan's text, compressed, with a hash of what was compressed.

First line `titan plan VERSION sha256 DIGEST`, then the text's other lines, all gzip with a fixed time stamp: equal
plans are equal files. Reading executes nothing and never expands more than `LARGEST_TEXT` bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from pathlib import Path

from titan.compiler.plan.program import Plan
from titan.compiler.plan.text import PlanFileError, parse_plan, print_plan

__all__ = ["LARGEST_TEXT", "PlanFileError", "plan_hash", "read_plan", "write_plan"]

LARGEST_TEXT = 256 * 1024 * 1024
_CHUNK = 1 << 20


def _split(plan: Plan) -> tuple[str, bytes]:
    """First line, and the rest that is hashed."""
    head, _, rest = print_plan(plan).partition("\n")
    return head, rest.encode()


def plan_hash(plan: Plan) -> str:
    """sha256 (hexadecimal) of the plan's text after its first line."""
    return hashlib.sha256(_split(plan)[1]).hexdigest()


def write_plan(plan: Plan, path: str | Path) -> str:
    """Writes the file in one step: it is whole or not there. Gives `plan_hash` of what it has written. Raises OSError
    when the place cannot be written."""
    head, rest = _split(plan)
    digest = hashlib.sha256(rest).hexdigest()
    line = f"{head} sha256 {digest}\n".encode()
    data = gzip.compress(line + rest, compresslevel=5, mtime=0)
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with partial.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return digest


def _expand(data: bytes) -> bytes:
    """Uncompressed bytes, stopping at the limit however large the file claims to be."""
    inflate = zlib.decompressobj(wbits=31)
    pieces: list[bytes] = []
    size = 0
    try:
        while data and not inflate.eof:
            piece = inflate.decompress(data, _CHUNK)
            data = inflate.unconsumed_tail
            size += len(piece)
            if size > LARGEST_TEXT:
                raise PlanFileError("T406", f"the plan expands beyond {LARGEST_TEXT >> 20} MiB; no plan is that large")
            pieces.append(piece)
    except zlib.error as problem:
        raise PlanFileError("T404", f"the plan file is damaged: {problem}") from None
    if not inflate.eof:
        raise PlanFileError("T404", f"the plan file is cut off after {size} bytes of text")
    if inflate.unused_data:
        raise PlanFileError("T404", f"{len(inflate.unused_data)} bytes follow the end of the plan")
    return b"".join(pieces)


def read_plan(path: str | Path) -> Plan:
    """The plan of a file.

    Raises PlanFileError: T401 not a plan, T402 another version, T403 malformed text, T404 cut off or damaged, T405
    edited (the hash differs), T406 larger than any plan; OSError when the file cannot be read.
    """
    data = Path(path).read_bytes()
    if not data.startswith(b"\x1f\x8b"):
        raise PlanFileError("T401", "this is not a plan file: it does not begin as gzip does")
    head, _, rest = _expand(data).partition(b"\n")
    words = head.decode("utf-8", "replace").split()
    if words[:2] != ["titan", "plan"]:
        raise PlanFileError("T401", "this is not a plan: the first line must be `titan plan VERSION sha256 DIGEST`")
    found = hashlib.sha256(rest).hexdigest()
    if words[2:3] == ["1"] and words[3:] != ["sha256", found]:
        stated = words[4] if len(words) > 4 else "missing"
        raise PlanFileError(
            "T405", f"the plan was changed after it was written: hash {found[:16]}, stated {stated[:16]}"
        )
    try:
        return parse_plan((head + b"\n" + rest).decode())
    except UnicodeDecodeError:
        raise PlanFileError("T403", "the plan's text is not UTF-8") from None
