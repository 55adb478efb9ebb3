"""Files: what cannot be read, and hostile contents, end in coded errors, and quickly."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from titan.grammar.diagnostics import TitanError, render_all
from titan.grammar.formatter import format_source
from titan.grammar.parser import parse
from titan.grammar.sources import LARGEST_SOURCE, library_path, read_source

from tests.clock import slowness


def read_codes(path: str | Path) -> TitanError:
    with pytest.raises(TitanError) as caught:
        read_source(path)
    assert render_all(caught.value)
    return caught.value


def test_reads_text_with_any_line_ends(tmp_path: Path) -> None:
    file = tmp_path / "a.titan"
    file.write_bytes(b'\xef\xbb\xbfx = 1\r\ny = 2\rz = "\xc3\xa9"\n')
    assert read_source(file) == 'x = 1\ny = 2\nz = "é"\n'


def test_a_missing_file_names_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "quickstart.titan").touch()
    (tmp_path / "quickstart.txt").touch()
    [problem] = read_codes(tmp_path / "quikstart.titan").diagnostics
    assert (problem.code, problem.nearest) == ("T118", (str(tmp_path / "quickstart.titan"),))
    [problem] = read_codes(tmp_path / "no/such.titan").diagnostics
    assert problem.code == "T118" and str(tmp_path / "no") in problem.label


def test_a_folder_is_not_a_spec(tmp_path: Path) -> None:
    (tmp_path / "a.titan").touch()
    [problem] = read_codes(tmp_path).diagnostics
    assert (problem.code, problem.nearest) == ("T119", (str(tmp_path / "a.titan"),))


def test_a_device_is_not_a_spec() -> None:
    assert read_codes("/dev/zero").diagnostics[0].code == "T119"


def test_bytes_that_are_not_utf8_are_placed(tmp_path: Path) -> None:
    file = tmp_path / "a.titan"
    file.write_bytes(b'x = 1\ny = "\xc3\xa9\xff"\n')
    [problem] = read_codes(file).diagnostics
    assert problem.code == "T120" and problem.span is not None
    assert (problem.span.line, problem.span.column) == (2, 7)


def test_too_large(tmp_path: Path) -> None:
    file = tmp_path / "a.titan"
    file.write_bytes(b"x" * 10_000_000)
    [problem] = read_codes(file).diagnostics
    assert problem.code == "T121" and "10,000,000" in problem.message and f"{LARGEST_SOURCE:,}" in problem.message


@pytest.mark.parametrize("path", ["a\0b.titan", "x" * 300 + ".titan"])
def test_impossible_paths(path: str) -> None:
    assert read_codes(path).diagnostics[0].code in ("T118", "T122")


N = LARGEST_SOURCE
HOSTILE = {
    "ten megabytes": ("a = 1\n" * 1_700_000, "T121"),
    "nested blocks": ("a = " + "{ a = " * 10_000 + "1" + "}" * 10_000, "T108"),
    "nested lists": ("a = " + "[" * 10_000 + "]" * 10_000, "T108"),
    "open brackets": ("{" * N, "T108"),
    "closing brackets": ("}" * N, "T105"),
    "mixed brackets": ("([{" * (N // 3), "T108"),
    "zero bytes": ("\0" * N, "T107"),
    "replacement characters": ("\ufffd" * N, "T107"),
    "one long number": ("a = " + "1" * (N - 4), "T112"),
    "one long unit": ("a = 1 " + "z" * (N - 6), "T110"),
    "one long word": ("a" * N, "T115"),
    "one long string": ('a = "' + "z" * (N - 5), "T106"),
    "quotes": ('"' * (N - 1), "T106"),
    "backslashes": ('a = "' + "\\q" * (N // 2 - 10) + '"', "T117"),
    "closers in a string": ('a = "' + "} ) ]" * (N // 5 - 2), "T106"),
    "long sum": ("a = 1" + " + 1" * (N // 4 - 2), "T109"),
    "long chain of with": ("a = b" + " with {}" * (N // 8 - 1), "T109"),
    "errors only": ("a = =\n" * (N // 6), "T101"),
    "bad lines in a block": ("a {\n" + "x 1\n" * (N // 4 - 3) + "}\n", "T115"),
    "unclosed lists": ("a = [\n" * (N // 6), "T104"),
    "names": ("a " * (N // 2), "T115"),
    "commas": ("," * N, "T101"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_sources_end_quickly_in_a_coded_error(case: str) -> None:
    source, code = HOSTILE[case]
    begin = time.process_time()
    with pytest.raises(TitanError) as caught:
        parse(source, "hostile.titan")
    picture = render_all(caught.value, {"hostile.titan": source})
    assert time.process_time() - begin < 2 * slowness()
    assert code in {d.code for d in caught.value.diagnostics}, picture[:500]
    assert len(picture) < 20_000 and max(map(len, picture.splitlines())) < 500
    assert picture.replace("\n", "").isprintable()


LARGE = {
    "lines": "\n" * N,
    "spaces": " " * N,
    "comment": "#" * N,
    "list": "a = [" + "1," * (N // 2 - 9) + "]",
    "block": "a {\n" + "x = 1\n" * (N // 6 - 2) + "}",
}


@pytest.mark.parametrize("case", LARGE)
def test_large_but_good_sources(case: str) -> None:
    source = LARGE[case]
    begin = time.process_time()
    parse(source, "large.titan")
    assert time.process_time() - begin < 3 * slowness()


def test_formatting_what_does_not_parse_is_refused() -> None:
    with pytest.raises(TitanError):
        format_source("a = = 1", "x")


def test_the_library_is_a_folder_with_specs_that_parse() -> None:
    for file in library_path().rglob("*.titan"):
        parse(read_source(file), str(file))
