"""Published measurements: rows of the table, and why some cannot be compared."""

from __future__ import annotations

import csv
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from tests.benchmarks.published_runs.spelling import COUNTS, plain
from tests.benchmarks.published_runs.spelling import FIGURES as MEASURED

FIXTURES = Path(__file__).parents[2] / "fixtures"


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
    def model(self) -> str:
        """The model's name in small letters, with dashes between its parts."""
        return re.sub("[_ ]", "-", self.text("model_name").lower())

    @property
    def ran_out(self) -> bool:
        """Whether the row itself says that it ran out of memory."""
        return self.text("status").lower() in ("oom", "out of memory")

    @property
    def eight_bit(self) -> bool:
        return "fp8" in self.text("precision") or "fp4" in self.text("precision")

    @property
    def step_time(self) -> float | None:
        """Published, or from the published speed of a device."""
        found, speed = self.figure("iter_time_s"), self.figure("tokens_per_s_per_gpu")
        if found is None and speed:
            found = self.number("global_batch_seqs") * self.number("seq_len") / (speed * self.number("num_gpus"))
        return found

    @property
    def memory(self) -> float | None:
        """Published peak in bytes: GiB where the source says so, else GB as printed."""
        found = self.figure("peak_mem_gb")
        unit = 2**30 if "gib" in self.text("mem_kind").lower() or self.source == "torchtitan" else 1e9
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


ARITHMETIC = ("bf16", "fp16", "fp8", "fp4", "mixed")  # one of these is in what a precision is called
WORDS = {
    "recompute": ("none", "full", "selective"),
    "sequence_parallel": ("", "true", "false"),
    "gated_mlp": ("", "0", "1"),
    "zero_stage": ("", "0", "1", "2", "3"),
}  # what cells may say, once `spelling` has read them
# Models by name whose layers are not all attention and feed-forward, or that do not only go on with text
OTHERS = {
    "layers of state spaces": r"mamba|jamba|zamba|nemotron-?h\b|nemotron-?v?3-(nano|super|ultra)|qwen3-next|rwkv",
    "an encoder": r"\b(bert|roberta|t5|flan|vit|clip)\b",
    "images": r"-vl\b|\bvlm?\b|llava|vision",
}
TUNED = r"(?<![a-z])(q?lora|peft|sft|fine-?tun[a-z]*)(?![a-z])"


def read(path: Path) -> list[Row]:
    """Rows of a table, cells as the table spells them. Raises ValueError where it is not text in UTF-8."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        return [Row(plain(cells)) for cells in csv.DictReader(file)]


def table_of(path: str) -> list[Row]:
    """The rows of a file that a command line names. Raises ArgumentTypeError."""
    try:
        return read(Path(path))
    except (OSError, ValueError, csv.Error) as error:
        raise ArgumentTypeError(f"{path}: {error}") from None


def _missing(row: Row) -> str:
    """A gated feed-forward layer has no usual width; in a model with both the experts' is not that of dense layers."""
    needed = [*NEEDED]
    if row.text("num_experts") in ("", "0"):
        needed += ["gated_mlp", *(["ffn_hidden"] if row.text("gated_mlp") == "1" else [])]
    else:
        mixed = row.text("dense_layers") not in ("", "0")
        needed += ["top_k", *(["ffn_hidden"] if mixed else [])]
        needed += ["moe_ffn_hidden"] if mixed or not row.text("ffn_hidden") else []
    if row.text("schedule").startswith("interleaved") and row.text("pp") != "1" and row.text("vpp") in ("", "0", "1"):
        needed.append("vpp")
    lacking = [name for name in needed if not row.text(name) or name == "vpp"]
    return "not fully specified: " + ", ".join(lacking) if lacking else ""


def _unread(row: Row) -> str:
    """Cells that are no numbers, or no such numbers or words as their columns can have."""
    for name in (*COUNTS, *MEASURED):
        text = row.text(name)
        if text and not _is_number(text, whole=name in COUNTS, least=1 if name in NEEDED else 0):
            return f"not understood: {name} = {text}"
    for name, words in WORDS.items():
        if row.text(name) not in words:
            return f"not understood: {name} = {row.text(name)}"
    return ""


def _is_number(text: str, whole: bool, least: int) -> bool:
    try:
        found = float(text)
    except ValueError:
        return False
    return isfinite(found) and (found >= least and found.is_integer() if whole else found > 0)


def _packed(row: Row) -> str:
    """Fine-tuning with adapters, packed sequences and offloading are other programs."""
    if re.search(TUNED, row.text("model_name") + " " + row.text("notes"), re.IGNORECASE):
        return "fine-tuning run"
    if row.text("offload") not in ("", "none"):
        return "offloads to the host"
    return ""


def _arithmetic(row: Row) -> str:
    precision = row.text("precision")
    if "fp4" in precision:
        return "4-bit arithmetic"
    if precision and not any(word in precision for word in ARITHMETIC):
        return f"arithmetic in {precision}"
    return ""


def _other(row: Row) -> str:
    found = next((what for what, said in OTHERS.items() if re.search(said, row.model)), "")
    if not found and row.text("num_experts") not in ("", "0") and row.text("gated_mlp") == "0":
        found = "experts without a gate"
    return f"a model with {found}" if found else ""


CHECKS: tuple[Callable[[Row], str], ...] = (_missing, _unread, _packed, _arithmetic, _other)


def skipped(row: Row) -> str:
    """Why a row is not compared; empty when it is."""
    return next((reason for check in CHECKS if (reason := check(row))), "")
