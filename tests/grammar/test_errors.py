"""The pictures of all syntax errors, and that an error neither hides another nor is reported twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from titan.grammar.catalogue_syntax import ROWS
from titan.grammar.diagnostics import TitanError, render_all
from titan.grammar.parser import parse
from titan.grammar.sources import read_source

CASES = sorted(
    path
    for pattern in ("T1*", "several*")
    for path in (Path(__file__).parents[1] / "golden/errors").glob(f"{pattern}.titan")
)
FILE_CODES = {"T118", "T119", "T120", "T121", "T122"}  # see test_sources.py


def errors_of(source: str, path: str = "spec.titan") -> TitanError:
    with pytest.raises(TitanError) as caught:
        parse(source, path)
    return caught.value


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_picture(case: Path, golden: Callable[[str], Callable[[str], None]]) -> None:
    source = read_source(case)
    assert source.startswith("# titan check")
    error = errors_of(source, case.name)
    assert case.stem.startswith("several") or case.stem[:4] in {d.code for d in error.diagnostics}
    golden(f"errors/{case.stem}.expect")(render_all(error, {case.name: source}))


def test_every_code_has_a_picture() -> None:
    assert {case.stem[:4] for case in CASES if case.stem[0] == "T"} == {row.code for row in ROWS} - FILE_CODES


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.code not in FILE_CODES | {"T108", "T109"}], ids=lambda row: row.code
)
def test_the_catalogue_example_shows_its_code(row) -> None:
    assert row.code in {d.code for d in errors_of(row.example).diagnostics}


GOOD = [
    "import models.llama",
    "model = llama.llama3_70b",
    "train {",
    "    sequence = 8Ki",
    "    global_batch = 4Mi tokens",
    "    optimizer = adamw {",
    "        learning_rate = 3e-4",
    "        betas = [0.9,",
    "            0.95]",
    "    }",
    "    data = tokens(\"corpus.bin\")",
    "}",
    "parallel {",
    "    tensor <= 8",
    "    schedule in [gpipe, one_f_one_b]",
    "}",
    "minimize step_time subject to memory <= 92% of device",
]  # fmt: skip
BAD_LINES = {
    "x = = 3": "T101", "x =": "T102", "x = 3 y = 4": "T103", "x = [1, 2": "T104", "x = 3 ]": "T105",
    'x = "abc': "T106", "x := 3": "T107", "x = 3 GiBB": "T110", "x = 1.5 B": "T111", "x = 1e99": "T112",
    "x = 1f1b": "T113", "of = 3": "T114", "x 3": "T115", "x": "T115", 'x = "\\q"': "T117", "x = 3 +": "T102",
    "x = (1": "T104", "x = * 2": "T101", "* = 2": "T101",
}  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_planted_errors_are_all_reported_and_nothing_else(seed: int) -> None:
    """Between good lines stand bad ones: each is reported once, with its code, on its line, and no good line is."""
    random.seed(seed)
    lines, planted = list(GOOD), []
    for place in sorted(random.sample([0, 1, 2, 3, 4, 5, 6, 7, 10, 12, 13, 14, 16], 4), reverse=True):
        bad = random.choice(list(BAD_LINES))
        indent = len(GOOD[place]) - len(GOOD[place].lstrip())
        lines.insert(place, " " * indent + bad)
        planted.append((place, BAD_LINES[bad]))
    planted.sort()
    expected = [(place + 1 + earlier, code) for earlier, (place, code) in enumerate(planted)]
    found = errors_of("\n".join(lines)).diagnostics
    assert [(d.span.line, d.code) for d in found if d.span] == expected


def test_errors_are_capped_and_say_so() -> None:
    found = errors_of("x = = 1\n" * 500).diagnostics
    assert len(found) == 20
    assert "only the first 20" in found[-1].notes[0].text


def test_a_missing_brace_leaves_the_other_blocks_checked() -> None:
    found = errors_of("train {\n    a = 1\n\nparallel {\n    b = = 2\n}\nc {\n    d = 3 GiBB\n}\n").diagnostics
    assert [(d.code, d.span.line) for d in found if d.span] == [("T104", 4), ("T101", 5), ("T110", 8)]
    assert found[0].notes[0].span is not None and found[0].notes[0].span.line == 1
