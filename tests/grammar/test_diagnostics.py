"""The picture of a diagnostic, and the catalogue."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from titan.grammar import catalogue
from titan.grammar.diagnostics import Diagnostic, Note, Span, TitanError, render, render_all
from titan.grammar.suggestions import nearest_names

SOURCE = "model = a\n\ttensor    = 6   # \x1b[31mred\n東京 = 64\n" + "x = " + "a + " * 200 + "b\n"


def test_the_picture() -> None:
    diagnostic = Diagnostic(
        "T203",
        "tensor = 6 does not divide 64 attention heads",
        Span("gpt.titan", 2, 14, 2, 15),
        "64 / 6 leaves 4",
        ("4", "8"),
        (Note("heads = 64 is set here", Span("gpt.titan", 3, 6, 3, 8)), Note("any divisor of 64 will do")),
    )
    assert render(diagnostic, {"gpt.titan": SOURCE}) == "\n".join(
        [
            "gpt.titan:2:14: error T203: tensor = 6 does not divide 64 attention heads",
            "   2 |     tensor    = 6   # ·[31mred",
            "     |                 ^ 64 / 6 leaves 4",
            "  nearest legal: 4, 8",
            "  gpt.titan:3:6: note: heads = 64 is set here",
            "     3 | 東京 = 64",
            "       |        ^^",
            "  note: any divisor of 64 will do",
        ]
    )


def test_without_place_or_source() -> None:
    plain = Diagnostic("T301", "nothing fits", label="the smallest needs 91.2 GiB", severity="warning")
    assert render(plain) == "warning T301: nothing fits\n  the smallest needs 91.2 GiB"
    lost = Diagnostic("T101", "odd", Span("/no/such/file.titan", 3, 1, 3, 2), "here")
    assert render(lost) == "/no/such/file.titan:3:1: error T101: odd\n  here"
    assert render_all(TitanError([plain, lost])) == render(plain) + "\n\n" + render(lost)


def test_reads_the_file_when_no_source_is_given(tmp_path: Path) -> None:
    file = tmp_path / "a.titan"
    file.write_text("x = 1\r\ny = 2\r\n")
    assert "   2 | y = 2\n     |     ^ here" in render(Diagnostic("T101", "odd", Span(str(file), 2, 5, 2, 6), "here"))


@pytest.mark.parametrize("column", [1, 5, 400, 805, 2000])
def test_long_lines_are_cut_around_the_place(column: int) -> None:
    picture = render(Diagnostic("T1", "m", Span("p", 4, column, 4, column + 1)), {"p": SOURCE})
    _, text, carets = picture.split("\n")
    assert max(len(text), len(carets)) < 130
    line = SOURCE.split("\n")[3]
    if column <= len(line):
        assert text[carets.index("^")] == line[column - 1]


def test_spans_over_several_lines_and_outside_of_the_source() -> None:
    assert render(Diagnostic("T1", "m", Span("p", 1, 7, 3, 2)), {"p": SOURCE}).endswith("      ^^^")
    assert render(Diagnostic("T1", "m", Span("p", 99, 7, 99, 8)), {"p": SOURCE}) == "p:99:7: error T1: m"


def test_titan_error_takes_one_or_many() -> None:
    one = Diagnostic("T101", "odd")
    assert TitanError(one).diagnostics == TitanError([one]).diagnostics == (one,)
    assert TitanError(one).exit_code == 2 and "T101: odd" in str(TitanError(one))


def test_the_catalogue_is_complete_and_sorted() -> None:
    for family, rows in catalogue.FAMILIES.items():
        codes = [row.code for row in rows]
        assert codes == sorted(set(codes))
        assert all(re.fullmatch(family + r"\d\d", code) for code in codes)
    for row in catalogue.CATALOGUE.values():
        assert all([row.title, row.rule, row.cause, row.example, row.cure]), row.code
        assert not row.title.endswith(".") and row.rule.endswith("."), row.code


def test_every_code_of_the_grammar_is_in_the_catalogue_and_used() -> None:
    folder = Path(catalogue.__file__).parent
    used = {
        code
        for file in folder.glob("*.py")
        if "catalogue" not in file.name
        for code in re.findall(r'"(T1\d\d)"', file.read_text())
    }
    assert used == {row.code for row in catalogue.FAMILIES["T1"]}


@pytest.mark.parametrize(
    ("word", "first"),
    [
        ("recompte", "recompute"),
        ("Tensor", "tensor"),
        ("globalbatch", "global_batch"),
        ("xyz", None),
        ("", None),
        ("t" * 10**6, None),
    ],
)
def test_suggestions(word: str, first: str | None) -> None:
    found = nearest_names(word, ["tensor", "recompute", "global_batch", "pipeline"])
    assert (found[0] if found else None) == first
