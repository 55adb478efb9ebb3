"""What a run shows and sums up, from records made by hand."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from titan.runtime.progress import Expectation, Progress


def step(number: int, loss: float | None = 2.0, seconds: float = 0.5, **more: Any) -> dict[str, Any]:
    base = {"event": "step", "step": number, "loss": loss, "grad_norm": 1.0, "learning_rate": 0.1, "skipped": False}
    sizes = {"register_peak_bytes": 100, "process_peak_bytes": 3 << 20}
    return {**base, **sizes, "step_time_s": seconds, "tokens_per_s": 1000 / seconds, **more}


def shown(
    expectation: Expectation, *records: dict[str, Any], entropy: float | None = None
) -> tuple[str, dict[str, Any]]:
    """Everything printed for the records, and the result."""
    out = io.StringIO()
    progress = Progress(expectation, 2, 0, len(records), 1000, out)
    for record in records:
        progress.handle(record)
    result = progress.result(entropy)
    progress.close()
    progress.summarise(result)
    return out.getvalue(), result


def test_speed_leaves_out_the_first_step() -> None:
    _, result = shown(
        Expectation(0.4), step(1, seconds=9.0), step(2, seconds=0.5), step(3, seconds=0.3), step(4, seconds=0.7)
    )
    assert result["measured_step_time_s"] == 0.5
    assert result["tokens_per_s"] == pytest.approx(3000 / 1.5)
    assert result["predicted_step_time_s"] == 0.4


def test_a_single_step_is_its_own_measure() -> None:
    assert shown(Expectation(), step(1, seconds=2.0))[1]["tokens_per_s"] == 500


def test_utilisation_counts_all_ranks_peaks() -> None:
    known = Expectation(flops_per_token=6e9, mfu_rule="6N", peak_flops=1e13)
    text, _ = shown(known, step(1, seconds=0.5))
    assert "MFU 60.0%" in text and "(6N)" in text  # 2000 tokens/s x 6e9 / (2 x 1e13)


def test_an_unknown_peak_is_said() -> None:
    text, _ = shown(Expectation(flops_per_token=6e9, unknown_peak="peak unknown: run titan profile"), step(1))
    assert "peak unknown: run titan profile" in text and "MFU 0" not in text


def test_entropy_and_held_out_loss_stand_with_their_difference() -> None:
    records = (step(1), {"event": "validation", "step": 1, "validation_loss": 3.25, "seconds": 0.1})
    text, result = shown(
        Expectation(), *records, {"event": "end", "step": 1, "stopped": False, "peak_memory_bytes": 7}, entropy=5.0
    )
    assert "the loss is 1.7500 nats below" in text
    assert (result["validation_loss"], result["unigram_entropy"], result["peak_memory_bytes"]) == (3.25, 5.0, 7)


def test_a_validation_before_the_end_is_not_the_result() -> None:
    records = (step(1), {"event": "validation", "step": 1, "validation_loss": 3.0, "seconds": 0.1}, step(2))
    assert shown(Expectation(), *records, entropy=5.0)[1]["validation_loss"] is None


def test_skipped_steps_are_counted_and_shown() -> None:
    text, result = shown(Expectation(), step(1), step(2, loss=math.nan, skipped=True))
    assert result["skipped_steps"] == 1
    assert "step 2: the gradient is not finite" in text


def test_plain_lines_are_few() -> None:
    text, _ = shown(Expectation(), *(step(n) for n in range(1, 501)))
    lines = [line for line in text.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["1/500", "2/500", "3/500", "500/500"]
