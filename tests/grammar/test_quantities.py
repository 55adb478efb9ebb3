"""Units against values worked out by hand, and the ways back against the way in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from titan.grammar.quantities import DIMENSIONS, UNITS, QuantityProblem, format_quantity, read_quantity, write_quantity


@pytest.mark.parametrize(
    ("text", "value", "dimension"),
    [
        ("80 GiB", 85_899_345_920, "bytes"),
        ("80GB", 80_000_000_000, "bytes"),
        ("1.5 KiB", 1536, "bytes"),
        ("0.1 GB", 100_000_000, "bytes"),
        ("400 Gb/s", 50_000_000_000, "bytes/s"),
        ("400 GB/s", 400_000_000_000, "bytes/s"),
        ("1 b/s", 0.125, "bytes/s"),
        ("3.35 TB/s", 3_350_000_000_000, "bytes/s"),
        ("989.4 TFLOP/s", 989_400_000_000_000, "flop/s"),
        ("1.979 PFLOPS", 1_979_000_000_000_000, "flop/s"),
        ("1 PFLOP", 10**15, "flops"),
        ("92%", 0.92, "fraction"),
        ("100 %", 1, "fraction"),
        ("3e-4", 0.0003, ""),
        ("1e3", 1000, ""),
        ("2.0", 2, ""),
        ("1_000_000", 1_000_000, ""),
        ("8Ki", 8192, ""),
        ("8 k", 8000, ""),
        ("4Mi tokens", 4_194_304, "tokens"),
        ("15T tokens", 15_000_000_000_000, "tokens"),
        ("15 T  tokens", 15_000_000_000_000, "tokens"),
        ("512 sequences", 512, "sequences"),
        ("5 us", 5e-6, "seconds"),
        ("5 µs", 5e-6, "seconds"),
        ("90 min", 5400, "seconds"),
        ("1.5 h", 5400, "seconds"),
        ("2 d", 172_800, "seconds"),
        ("2.50 USD/h", 2.5, "money/hour"),
        ("2.5 $/h", 2.5, "money/hour"),
        ("3M USD", 3_000_000, "money"),
        ("-3 GiB", -3_221_225_472, "bytes"),
        ("1e40", 10**40, ""),
    ],
)
def test_values(text: str, value: int | float, dimension: str) -> None:
    found = read_quantity(text)
    assert found == (value, dimension)
    assert type(found[0]) is type(value)


@pytest.mark.parametrize(
    ("text", "code", "nearest"),
    [
        ("80 GiBB", "T110", "80 GiB"),
        ("80 gib", "T110", "80 GiB"),
        ("80 Gb", "T110", "80 GB"),
        ("80 KB", "T110", "80 kB"),
        ("8 K", "T110", "8k"),
        ("300B tokens", "T110", "300G tokens"),
        ("4Mi token_s", "T110", "4Mi tokens"),
        ("400 Gbps", "T110", "400 Gb/s"),
        ("7 hours", "T110", "7 h"),
        ("1 TFLOPs", "T110", "1 TFLOP/s"),
        ("3 GiB/nodes", "T110", None),
        ("1f1b", "T113", None),
        ("1.3 B", "T111", "1 B"),
        ("1.1 KiB", "T111", "1127 B"),
        ("0.5 tokens", "T111", "1 tokens"),
        ("1e999", "T112", None),
        ("1e-999999999999", "T112", None),
        ("9" * 5000, "T112", None),
        ("1e40 TB", "T112", None),
        ("0_", "T110", None),
        ("1__0", "T113", None),
        ("x", "T113", None),
        ("", "T113", None),
    ],
)
def test_problems(text: str, code: str, nearest: str | None) -> None:
    with pytest.raises(QuantityProblem) as caught:
        read_quantity(text)
    assert caught.value.code == code
    assert nearest in caught.value.nearest if nearest else not caught.value.nearest


@pytest.mark.parametrize(
    ("value", "dimension", "text"),
    [
        (80 * 2**30, "bytes", "80 GiB = 85.9 GB"),
        (80 * 10**9, "bytes", "74.5 GiB = 80 GB"),
        (0, "bytes", "0 B"),
        (50 * 10**9, "bytes/s", "400 Gb/s = 50 GB/s"),
        (989.4e12, "flop/s", "989 TFLOP/s"),
        (4 * 2**20, "tokens", "4Mi tokens = 4.19M tokens"),
        (15 * 10**12, "tokens", "15T tokens"),
        (12345, "tokens", "12345 tokens"),
        (0.92, "fraction", "92%"),
        (0.0031, "seconds", "3.1 ms"),
        (5400, "seconds", "1.5 h"),
        (8192, "", "8192"),
        (0.0003, "", "0.0003"),
        (2.5, "money/hour", "2.5 USD/h"),
    ],
)
def test_format(value: int | float, dimension: str, text: str) -> None:
    assert format_quantity(value, dimension) == text


values = st.one_of(st.integers(0, 10**18), st.integers(0, 4096).map(lambda n: n * 2**30), st.floats(1e-9, 1e18))


@given(values, st.sampled_from(DIMENSIONS))
def test_written_quantities_are_read_back_exactly(value: int | float, dimension: str) -> None:
    if dimension in ("bytes", "tokens", "sequences"):
        value = int(value)
    if dimension == "fraction":
        value = round(min(value, 1e6), 6)
    found, kind = read_quantity(write_quantity(value, dimension))
    assert (found, kind) == (value, dimension)


def test_written_forms_are_short() -> None:
    cases = {
        (80 * 2**30, "bytes"): "80 GiB", (80 * 10**9, "bytes"): "80 GB", (4 * 2**20, "tokens"): "4Mi tokens",
        (8192, ""): "8Ki", (0.92, "fraction"): "92%", (2.5, "money/hour"): "2.5 USD/h", (0.25, "seconds"): "0.25 s",
    }  # fmt: skip
    assert {case: write_quantity(*case) for case in cases} == cases


def test_no_unit_differs_from_another_by_case_and_dimension_only() -> None:
    """`Mb/s` and `MB/s` differ by a factor 8 and both exist; all others that look alike are refused, not confused."""
    folded: dict[str, set[str]] = {}
    for unit in UNITS:
        folded.setdefault(unit.lower(), set()).add(unit)
    alike = {frozenset(units) for units in folded.values() if len(units) > 1}
    assert all({unit[-3:].lower() for unit in units} == {"b/s"} for units in alike), alike
