"""The benchmark of searched plans beside published layouts, on runs that it has to answer for."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.benchmarks import searched
from tests.benchmarks.published_runs.rows import FIXTURES, Row, read

ROWS = {row.key: row for row in read(FIXTURES / "published_runs.csv")}


@pytest.mark.parametrize("key", ["llmfoundry-0211", "dgxc-benchmarking-0086", "dgxc-benchmarking-0087"])
def test_the_search_is_as_fast_as_a_published_layout(key: str) -> None:
    """The last two fill a pipeline of 8 with 16 micro-batches: 1F1B, by which meshes are bounded, takes half as long
    again there, and interleaved chunks do not."""
    found = searched.compare(ROWS[key], {})
    assert found.good and 0 < found.searched <= found.published


def test_what_is_not_compared_is_counted_by_reason() -> None:
    untold = Row({**ROWS["llmfoundry-0211"].cells, "micro_batch": ""})
    large = Row({**ROWS["llmfoundry-0211"].cells, "hidden": "65536", "row_id": "large"})
    why: Counter[str] = Counter()
    assert list(searched.compared([untold, large], why)) == []
    assert why["not fully specified: micro_batch"] == 1 and why.total() == 2
    worse = searched.Compared("some", 1.0, 1.1, "theirs", "ours")
    report = json.loads(json.dumps(searched.report(3, [worse], why, 0.5)))
    assert not worse.good and report["compared"] == 1 and report["at_least_as_fast"] == 0
    assert report["worse"][0]["row"] == "some" and report["rows"] == 3
    assert report["median_gain_pct"] == pytest.approx(100 * (1 / 1.1 - 1))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--part", "5/4"], "5/4 is no part"), (["--part", "0/4"], "0/4 is no part"), (["--runs", "absent"], "absent")],
)
def test_options_that_name_nothing_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        searched.main(arguments)
    assert said in capsys.readouterr().err
