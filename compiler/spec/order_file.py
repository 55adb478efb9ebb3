"""`schedule = "orders/mine.csv"`: an order of the pipeline from a file beside the spec."""

from __future__ import annotations

from pathlib import Path

from titan.compiler.schedules.registry import add_written
from titan.compiler.spec.report import Refusal
from titan.compiler.spec.values import Text
from titan.grammar.diagnostics import TitanError

LARGEST = 64 << 20  # bytes


def read_schedule(value: Text) -> str:
    """The name of the schedule that a table of PyTorch's pipeline actions holds; the path is relative to the spec.

    Refuses with T410 what is no file or no order; of an order the cell at fault is named.
    """
    from titan.compiler.formats.pipeline_csv import read_order

    path = Path(value.span.path).parent / value.value
    try:
        if path.stat().st_size > LARGEST:
            raise Refusal("T410", f"`{value.value}` has more than {LARGEST} bytes: no table of a pipeline", value.span)
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise Refusal("T410", f"the table `{value.value}` cannot be read: {reason}", value.span) from None
    try:
        return add_written(path.stem, read_order(text, str(path)))
    except ValueError as error:
        raise Refusal("T410", f"{path}: {error}", value.span) from None
    except TitanError as error:
        found = error.diagnostics[0]
        raise Refusal(found.code, f"{path}: {found.message}", value.span, found.nearest) from None
