"""Published measurements: rows of the table, and why some cannot be compared."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FIXTURES = Path(__file__).parents[2] / "fixtures"
NARROW = ("fp16-mixed", "bf16-mixed", "bf16", "fp16/bf16", "bf16/fp16-mixed")  # 16-bit arithmetic


@dataclass(frozen=True)
class Row:
    """One run as published; `cells` are the columns as text."""

    cells: dict[str, str]

    def text(self, name: str) -> str:
        return (self.cells.get(name) or "").strip()

    def number(self, name: str, default: int = 0) -> int:
        """A whole number; Raises ValueError when the cell holds something else."""
        found = self.text(name)
        return int(float(found)) if found else default

    def figure(self, name: str) -> float | None:
        found = self.text(name)
        return float(found) if found else None

    @property
    def key(self) -> str:
        return self.text("row_id")

    @property
    def source(self) -> str:
        return self.text("source_key")

    @property
    def priority(self) -> str:
        return self.text("priority")

    @property
    def eight_bit(self) -> bool:
        return "fp8" in self.text("precision") or "fp4" in self.text("precision")

    @property
    def step_time(self) -> float | None:
        return self.figure("iter_time_s")

    @property
    def memory(self) -> float | None:
        """Published peak in bytes: GiB where the source says so, else GB as printed."""
        found = self.figure("peak_mem_gb")
        unit = 2**30 if "GiB" in self.text("mem_kind") or self.source == "torchtitan" else 1e9
        return None if found is None else found * unit


NEEDED = (
    "layers",
    "hidden",
    "heads",
    "seq_len",
    "tp",
    "pp",
    "micro_batch",
    "global_batch_seqs",
    "recompute",
    "num_gpus",
)


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return [Row(cells) for cells in csv.DictReader(file)]


def _missing(row: Row) -> str:
    lacking = [name for name in NEEDED if not row.text(name)]
    return "not fully specified: " + ", ".join(lacking) if lacking else ""


def _packed(row: Row) -> str:
    """Fine-tuning with adapters, packed sequences and offloading are other programs."""
    if re.search(r"lora|sft|finetun", row.text("model_name") + row.text("notes"), re.IGNORECASE):
        return "fine-tuning run"
    if row.text("offload") not in ("", "none", "false", "0"):
        return "offloads to the host"
    return ""


def _four_bit(row: Row) -> str:
    return "4-bit arithmetic" if "fp4" in row.text("precision") else ""


CHECKS: tuple[Callable[[Row], str], ...] = (_missing, _packed, _four_bit)


def skipped(row: Row) -> str:
    """Why a row is not compared; empty when it is."""
    return next((reason for check in CHECKS if (reason := check(row))), "")
