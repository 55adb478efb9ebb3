"""The run's log: `log.jsonl`, one JSON object a line, written as it happens. No NaN: what is not finite is null."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

NAME = "log.jsonl"


class Log:
    """Appends records; `keep_to` drops those of later steps, which an earlier run wrote after its last save."""

    def __init__(self, folder: Path, keep_to: int | None = None) -> None:
        self.path = folder / NAME
        if keep_to is not None and self.path.exists():
            _trim(self.path, keep_to)
        self._stream = self.path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        """One line, handed to the operating system at once."""
        self._stream.write(json.dumps(finite(record), allow_nan=False) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def finite(value: Any) -> Any:
    """The value with numbers that JSON cannot hold replaced by None."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_log(path: Path) -> list[dict[str, Any]]:
    """All whole lines; a last line that was cut off is left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            found.append(record)
    return found


def _trim(path: Path, last: int) -> None:
    kept = [record for record in read_log(path) if int(record.get("step", -1)) <= last]
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    partial.replace(path)
