"""Warnings of the plan's summary, and what `with` cannot change."""

from __future__ import annotations

from dataclasses import replace

import pytest
from titan.compiler.cost.predict import Prediction, predict
from titan.compiler.lower import lower
from titan.compiler.report.summary import warnings

from tests.compiler.spec.writing import only, pointed_at, problems, spec_text
from tests.equivalence.configurations import Configuration, spec_of, strategy_of


def test_T226_with_changes_only_a_block() -> None:
    text = spec_text(model="width = 64\nmodel = width with { vocab = 5 }")
    found = only(problems(text))
    assert found.code == "T226" and found.message.endswith("this is 64")
    assert pointed_at(found, text) == "width"


def test_T226_a_number_has_no_keys() -> None:
    text = spec_text(model="model = tiny.llama with { hidden.size = 5 }")
    found = only(problems(text))
    assert found.code == "T226" and found.message.startswith("`hidden` is")


def test_T254_fewer_micro_batches_than_stages() -> None:
    """Two micro-batches on eight stages: 7 of 9 times a stage's step is idle, by the closed form of 1F1B."""
    found = only(problems(spec_text("pipeline = 8, data = 1, tensor = 1, micro_batch = 4", batch="8")))
    assert (found.code, found.severity) == ("T254", "warning")
    assert f"{7 / 9:.3g}" in found.message and "2 micro-batches on 8 stages" in found.message


def _predicted(limit: int | None = None) -> tuple[list[str], Prediction]:
    """The warnings of a small plan, with this memory limit in bytes."""
    spec = spec_of(Configuration(), "fp32")
    found = predict(lower(spec, strategy_of(Configuration())))
    if limit is not None:
        found = replace(found, ledger=replace(found.ledger, limit=limit))
    return warnings(spec, strategy_of(Configuration()), found), found


def test_T303_memory_between_the_prediction_and_its_upper_bound_is_at_risk() -> None:
    ledger = _predicted()[1].ledger
    assert ledger.upper > ledger.peak
    for limit, warned in ((ledger.upper, False), (ledger.upper - 1, True), (ledger.peak, True)):
        listed, found = _predicted(limit)
        assert any(line.startswith("T303") for line in listed) is warned, found.ledger.verdict


def test_T305_an_unmeasured_machine_has_no_peak() -> None:
    listed, found = _predicted(None)
    assert found.used.peak is None
    assert [line[:4] for line in listed] == ["T305"]


@pytest.mark.parametrize("stages", [2, 4])
def test_T254_is_silent_where_every_stage_has_a_micro_batch(stages: int) -> None:
    assert (
        problems(spec_text(f"pipeline = {stages}, data = 1, tensor = 1, micro_batch = 1", batch="8", devices=stages))
        == ()
    )
