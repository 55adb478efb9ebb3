"""Tokens: nothing is lost, and the unit belongs to its number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from titan.grammar.scanner import scan


@given(st.text("ab.=<>{}[](),+-*/%$'\"#\\ \t\n\r019eGiKs_é\0:;", max_size=60))
def test_every_character_is_in_a_token_or_is_a_space(source: str) -> None:
    lines = source.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for token in scan(source, "x", 10**6)[0]:
        if token.type != "_NEWLINE":
            line = lines[token.line - 1]
            start, end = token.column - 1, token.column - 1 + len(token.text)
            assert line[start:end] == token.text
            lines[token.line - 1] = line[:start] + " " * (end - start) + line[end:]
    assert not "".join(lines).strip(" \t")


def texts(source: str) -> list[str]:
    return [token.text for token in scan(source, "x", 100)[0]]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("80 GiB", ["80 GiB"]),
        ("80GiB", ["80GiB"]),
        ("4Mi tokens", ["4Mi tokens"]),
        ("4 Mi tokens", ["4 Mi tokens"]),
        ("92% of device", ["92%", "of", "device"]),
        ("8 and x", ["8", "and", "x"]),
        ("8 in x", ["8", "in", "x"]),
        ("8 with {", ["8", "with", "{"]),
        ("80 GiB\ntensor = 1", ["80 GiB", "\n", "tensor", "=", "1"]),
        ("a = 1 b = 2", ["a", "=", "1", "b", "=", "2"]),
        ("3 * dense {", ["3", "*", "dense", "{"]),
        ("3 dense {", ["3", "dense", "{"]),
        ("80 GiB / 2", ["80 GiB", "/", "2"]),
        ("400 Gb/s, x", ["400 Gb/s", ",", "x"]),
        ("2.5 USD/h", ["2.5 USD/h"]),
        ("3e-4", ["3e-4"]),
        ("3-4", ["3", "-", "4"]),
        ("= -4", ["=", "-4"]),
        ("subject  to", ["subject  to"]),
        ("subject = 1", ["subject", "=", "1"]),
        ("a.b_c.d", ["a.b_c.d"]),
        ('"a # b" # c', ['"a # b"', "# c"]),
    ],
)
def test_tokens(source: str, expected: list[str]) -> None:
    assert texts(source) == expected
