"""What a person sees while a run goes on, and what it comes to at the end. Everything goes to stderr.

On a terminal a bar that is drawn again; elsewhere plain lines: the first steps, then one every two seconds at most.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

FIRST_LINES = 3
PAUSE = 2.0  # seconds between plain lines
WIDE = 120  # columns of a terminal that has room for a bar beside the figures
WARM_UP = 1  # steps that speed is not measured over: the first one meets cold caches and new connections


@dataclass(frozen=True, slots=True)
class Expectation:
    """What was predicted, and how to say how well the hardware is used. `peak_flops` of one device, None: not known."""

    step_time_s: float | None = None
    flops_per_token: float | None = None
    mfu_rule: str = ""
    peak_flops: float | None = None
    unknown_peak: str = ""

    def utilisation(self, tokens_per_s: float, ranks: int) -> str:
        if self.flops_per_token is None:
            return ""
        if not self.peak_flops:
            return self.unknown_peak
        return f"MFU {tokens_per_s * self.flops_per_token / ranks / self.peak_flops:.1%}"


class Progress:
    """Takes the records of a run in order, shows them and sums them up."""

    def __init__(
        self,
        expectation: Expectation,
        ranks: int,
        first: int,
        stop: int,
        tokens_per_step: int,
        out: TextIO | None = None,
    ) -> None:
        self._expected, self._ranks, self._first, self._stop = expectation, ranks, first, stop
        self._tokens = tokens_per_step
        self._out = out or sys.stderr
        self._bar: Bar | None = _bar(self._first, self._stop) if self._out.isatty() else None
        self._shown = 0.0
        self._lines = 0
        self._times: list[float] = []
        self._losses: list[float | None] = []
        self._skipped = 0
        self._validation: dict[str, Any] = {}
        self._end: dict[str, Any] = {}

    def handle(self, record: dict[str, Any]) -> None:
        """One record, as `run` emits them."""
        event = record["event"]
        if event == "step":
            self._step(record)
        elif event == "validation":
            self._validation = record
            self._print(f"step {record['step']}: held-out loss {record['validation_loss']:.4f}")
        elif event == "saved":
            self._print(f"step {record['step']}: saved in {record['seconds']:.2f} s")
        elif event == "end":
            self._end = record

    def _step(self, record: dict[str, Any]) -> None:
        self._times.append(record["step_time_s"])
        self._losses.append(record["loss"])
        self._skipped += bool(record["skipped"])
        if record["skipped"]:
            self._print(f"step {record['step']}: the gradient is not finite, nothing was updated")
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=record["step"], figures=self._figures(record))
            return
        now = time.monotonic()
        if self._lines < FIRST_LINES or now - self._shown >= PAUSE or record["step"] == self._stop:
            self._shown, self._lines = now, self._lines + 1
            self._print(f"step {record['step']}/{self._stop}  {self._figures(record)}")

    def _figures(self, record: dict[str, Any]) -> str:
        expected = self._expected.step_time_s
        predicted = f" (predicted {expected:.3f})" if expected is not None else ""
        loss = record["loss"] if record["loss"] is not None else math.nan
        parts = [
            f"loss {loss:.4f}",
            f"{record['tokens_per_s']:,.0f} tokens/s",
            f"{record['step_time_s']:.3f} s{predicted}",
            f"{record['process_peak_bytes'] / (1 << 20):,.0f} MiB",
            self._expected.utilisation(record["tokens_per_s"], self._ranks),
        ]
        return "  ".join(part for part in parts if part)

    def say(self, text: str) -> None:
        """A line of the launcher's own."""
        self._print(text)

    def _print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._out, flush=True)

    def close(self) -> None:
        """Leaves the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def result(self, unigram_entropy: float | None) -> dict[str, Any]:
        """The object that `titan run --json` prints."""
        times = self._times[WARM_UP:] or self._times
        measured = statistics.median(times) if times else None
        finished = self._end.get("step", self._first + len(self._times))
        validation = self._validation.get("validation_loss") if self._validation.get("step") == finished else None
        return {
            "steps": finished,
            "first_loss": self._losses[0] if self._losses else None,
            "final_loss": self._losses[-1] if self._losses else None,
            "validation_loss": validation,
            "unigram_entropy": unigram_entropy if validation is not None else None,
            "tokens_per_s": self._tokens * len(times) / sum(times) if times else None,
            "measured_step_time_s": measured,
            "predicted_step_time_s": self._expected.step_time_s,
            "peak_memory_bytes": self._end.get("peak_memory_bytes"),
            "ranks": self._ranks,
            "skipped_steps": self._skipped,
            "stopped": bool(self._end.get("stopped", False)),
        }

    def summarise(self, result: dict[str, Any]) -> None:
        """The closing lines."""
        if result["first_loss"] is not None and result["final_loss"] is not None:
            self._print(f"training loss    {result['first_loss']:.4f} -> {result['final_loss']:.4f}")
        if result["validation_loss"] is not None:
            self._print(f"held-out loss    {result['validation_loss']:.4f} nats")
        if result["unigram_entropy"] is not None:
            below = result["unigram_entropy"] - result["validation_loss"]
            place = f"the loss is {abs(below):.4f} nats {'below' if below >= 0 else 'above'}"
            self._print(f"unigram entropy  {result['unigram_entropy']:.4f} nats of the same held-out split: {place}")
        if result["measured_step_time_s"] is not None:
            self._print(self._speed(result))

    def _speed(self, result: dict[str, Any]) -> str:
        expected, measured = result["predicted_step_time_s"], result["measured_step_time_s"]
        predicted = f", predicted {expected:.3f} s ({measured / expected:.2f}x)" if expected else ""
        used = self._expected.utilisation(result["tokens_per_s"], self._ranks)
        rule = f"; {used} ({self._expected.mfu_rule})" if used and self._expected.peak_flops else f"; MFU {used}"
        peak = result["peak_memory_bytes"]
        memory = f"; peak {peak / (1 << 20):,.0f} MiB on one rank" if peak else ""
        step = f"step {measured:.3f} s (median){predicted}"
        return f"speed            {result['tokens_per_s']:,.0f} tokens/s, {step}{rule if used else ''}{memory}"


def _bar(first: int, stop: int) -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns: list[ProgressColumn] = [MofNCompleteColumn(), TimeRemainingColumn()]
    if console.width >= WIDE:
        columns.insert(1, BarColumn(bar_width=16))
    columns.append(TextColumn("{task.fields[figures]}", markup=False))
    bar = Bar(*columns, console=console, refresh_per_second=4)
    bar.add_task("train", total=stop, completed=first, figures="starting")
    bar.start()
    return bar
