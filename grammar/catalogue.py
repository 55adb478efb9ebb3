"""Every code a diagnostic can have, with the long text that `titan explain CODE` prints; one row per code."""

from __future__ import annotations

from titan.grammar import (
    catalogue_data,
    catalogue_layout,
    catalogue_plan,
    catalogue_run,
    catalogue_search,
    catalogue_spec,
    catalogue_syntax,
    catalogue_verify,
)
from titan.grammar.diagnostics import Code

__all__ = ["CATALOGUE", "FAMILIES", "Code"]

# family digit -> rows; a family's files may only hold codes that begin with its digit
FAMILIES: dict[str, tuple[Code, ...]] = {
    "T1": catalogue_syntax.ROWS,
    "T2": tuple(sorted((*catalogue_spec.ROWS, *catalogue_layout.ROWS), key=lambda row: row.code)),
    "T3": catalogue_search.ROWS,
    "T4": catalogue_plan.ROWS,
    "T5": catalogue_data.ROWS,
    "T6": catalogue_run.ROWS,
    "T7": catalogue_verify.ROWS,
}

CATALOGUE: dict[str, Code] = {row.code: row for rows in FAMILIES.values() for row in rows}
