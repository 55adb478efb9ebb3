"""Layouts of one model that were measured beside each other, as its software ran them; the test bears its case's id."""

from __future__ import annotations

import pytest
from titan.compiler.cost.memory import verdict

from tests.benchmarks.published_runs.predict import predict
from tests.benchmarks.published_runs.rows import FIXTURES, Row, read

# tensor, pipeline, data, micro-batch -> seconds of a step that were measured; None: out of memory
MEASURED: dict[tuple[int, int, int, int], float | None] = {
    (8, 6, 8, 4): 114.1,
    (4, 12, 8, 2): 110.5,
    (2, 12, 16, 2): 112.5,
    (2, 24, 8, 1): 119.5,
    (8, 1, 48, 1): None,
    (2, 6, 32, 1): None,
}


def test_S_PERF_01_layouts_of_181b_on_384_devices() -> None:
    base = next(row for row in read(FIXTURES / "published_runs.csv") if row.key == "bloom-0101")
    seconds: dict[tuple[int, int, int, int], float] = {}
    for layout, measured in MEASURED.items():
        names = ("tp", "pp", "dp", "micro_batch")
        cells = {**base.cells, "heads": "64", "kv_heads": "64", **dict(zip(names, map(str, layout)))}
        found = predict(Row(cells), memory_only=measured is None)
        fits = verdict(found.point, found.upper, found.device) == "fits"
        assert fits is (measured is not None), layout
        if measured is not None:
            seconds[layout] = found.seconds
            assert found.seconds == pytest.approx(measured, rel=0.2), layout
    chosen = MEASURED[min(seconds, key=lambda layout: seconds[layout])]
    assert chosen is not None and chosen <= 1.05 * 110.5
