"""Text to tokens, without loss: spaces apart, every character is in a token, comments and ends of lines too.

The parser, the formatter and an editor all read these tokens; the grammar (`titan.lark`) speaks of their types.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from titan.grammar.diagnostics import Diagnostic, Span
from titan.grammar.quantities import NUMBER, QuantityProblem, read_quantity

KEYWORDS = {
    "import": "IMPORT",
    "with": "WITH",
    "in": "RELATION",
    "and": "AND",
    "of": "OF",
    "minimize": "DIRECTION",
    "maximize": "DIRECTION",
    "subject": "NAME",  # a keyword only before `to`
}
OPENERS = {"LBRACE": "RBRACE", "LSQB": "RSQB", "LPAR": "RPAR"}
CLOSERS = {closer: opener for opener, closer in OPENERS.items()}
VALUE_ENDS = frozenset({"NAME", "QUANTITY", "STRING", "RBRACE", "RSQB", "RPAR"})

_PUNCTUATION = {
    "{": "LBRACE", "}": "RBRACE", "[": "LSQB", "]": "RSQB", "(": "LPAR", ")": "RPAR", ",": "COMMA",
    "=": "RELATION", "<=": "RELATION", ">=": "RELATION", "+": "SUM", "-": "SUM", "*": "PRODUCT", "/": "PRODUCT",
}  # fmt: skip

# A word after a number is its unit unless it is a keyword or begins the next entry (`a = 1 b = 2` lacks a comma).
_WORD = r"(?>[A-Za-zµμ_][\wµμ]*)"
_UNIT = rf"(?>{_WORD}(?:/{_WORD})?)"
_NOT_A_UNIT = r"(?!(?:and|of|with|in|subject|import|minimize|maximize)\b)"
_NO_ENTRY = r"(?![ \t]*(?:[={(.]|<=|>=|in\b))"
_AFTER_SPACE = rf"[ \t]+{_NOT_A_UNIT}{_UNIT}{_NO_ENTRY}"
_QUANTITY = rf"""
    {NUMBER}
    (?: [ \t]*% | [ \t]*\$(?:/{_WORD})?
      | [ \t]*(?>[KMGTP]i|[kKMGTPEB])(?!\w){_AFTER_SPACE}
      | {_UNIT} | {_AFTER_SPACE} )?
"""
_TOKEN = re.compile(
    rf"""
      (?P<SPACE>[ \t]+)
    | (?P<_NEWLINE>\r\n|\n|\r)
    | (?P<COMMENT>\#[^\r\n]*)
    | (?P<_SUBJECT_TO>subject[ \t]+to\b)
    | (?P<NAME>(?a:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*))
    | (?P<QUANTITY>{_QUANTITY})
    | (?P<PUNCTUATION>[{{}}\[\](),+*/]|(?<![=<>])(?:<=|>=|=)(?![=<>])|-(?!>))
    | (?P<STRING>"(?:[^"\\\r\n]|\\[^\r\n])*")
    | (?P<OPEN_STRING>"[^\r\n]*)
    | (?P<BAD>[=<>:!&|~-]+|'[^'\r\n]*'?|[^\x00-\x7f]+|.)
    """,
    re.VERBOSE | re.DOTALL,
)
_DIGITS = frozenset("0123456789")
_ESCAPES = {"n": "\n", "t": "\t", '"': '"', "\\": "\\"}
_INSTEAD = {
    "==": "write `=`", ":=": "write `=`", ":": "write `=`", "<": "write `<=`", ">": "write `>=`", "=<": "write `<=`",
    "=>": "write `>=`", ";": "end the line instead", ".": "a number has one point, a name no spaces around its dots",
    "->": "write `=`", "&&": "write `and`", "&": "write `and`", "%": "a percentage is a number with `%`",
    "$": "an amount is written `2.50 USD`", "@": "", "!": "", "\\": "a list may go on over several lines without it",
}  # fmt: skip


class Token(NamedTuple):
    """A token on one line; `value` is (number, dimension) of a QUANTITY, the text without quotes of a STRING."""

    type: str
    text: str
    line: int
    column: int
    value: tuple[int | float, str] | str | None = None

    def span(self, path: str) -> Span:
        return Span(path, self.line, self.column, self.line, self.column + max(len(self.text), 1))


def scan(source: str, path: str, limit: int) -> tuple[list[Token], list[Diagnostic]]:
    """All tokens but spaces, and what is wrong with single ones; a wrong token stays, so that parsing can go on.

    Stops after `limit` diagnostics.
    """
    problems: list[Diagnostic] = []
    tokens: list[Token] = []
    for token in _tokens(source):
        checked = token
        if token.type in ("QUANTITY", "STRING", "OPEN_STRING", "BAD"):
            checked, found = _check(token, path)
            problems.extend(found)
        tokens.append(checked)
        if len(problems) >= limit:
            break
    return tokens, problems


def _tokens(source: str) -> Iterator[Token]:
    """Types and places. A minus directly before a digit belongs to the number unless it stands behind a value."""
    line_start = int(source.startswith("\ufeff"))  # a byte order mark has no column
    position, line, before = line_start, 1, "_NEWLINE"
    match = _TOKEN.match
    while found := match(source, position):
        kind, text, start, position = found.lastgroup or "", found[0], position, found.end()
        if kind == "SPACE":
            continue
        if kind == "NAME":
            kind = KEYWORDS.get(text, "NAME")
        elif kind == "PUNCTUATION":
            kind = _PUNCTUATION[text]
            if text == "-" and before not in VALUE_ENDS and source[position : position + 1] in _DIGITS:
                number = match(source, position)
                if number is not None and number.lastgroup == "QUANTITY":
                    kind, text, position = "QUANTITY", "-" + number[0], number.end()
        elif kind == "OPEN_STRING":  # what closes brackets at the end of its line is hardly meant to be inside
            text = text.rstrip(" \t)]}")
            position = start + len(text)
        yield Token(kind, text, line, start - line_start + 1)
        before = kind
        if kind == "_NEWLINE":
            line, line_start = line + 1, position


def _check(token: Token, path: str) -> tuple[Token, list[Diagnostic]]:
    if token.type == "QUANTITY":
        try:
            return Token(*token[:4], read_quantity(token.text)), []
        except QuantityProblem as problem:
            wrong = Diagnostic(problem.code, problem.message, token.span(path), problem.label, problem.nearest)
            return token._replace(value=(0, "")), [wrong]
    if token.type == "STRING":
        return _read_string(token, path)
    if token.type == "OPEN_STRING":
        wrong = Diagnostic("T106", "the string does not end on its line", token.span(path), 'a `"` is missing')
        return token._replace(type="STRING", value=token.text[1:]), [wrong]
    return token, [_bad_character(token, path)]


def _read_string(token: Token, path: str) -> tuple[Token, list[Diagnostic]]:
    text = token.text[1:-1]
    if "\\" not in text:
        return token._replace(value=text), []
    problems = []
    for found in re.finditer(r"\\(.)", text):
        if found[1] not in _ESCAPES:
            column = token.column + 1 + found.start()
            place = Span(path, token.line, column, token.line, column + 2)
            problems.append(
                Diagnostic("T117", f"`{found[0]}` is not an escape", place, nearest=(r"\\", r"\"", r"\n", r"\t"))
            )
    return token._replace(value=re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), text)), problems


def _bad_character(token: Token, path: str) -> Diagnostic:
    text = token.text
    if text[0] == "'":
        return Diagnostic(
            "T107", "strings stand between double quotes", token.span(path), f'write "{text.strip(chr(39))[:40]}"'
        )
    shown = f"`{text}`" if text.isprintable() else f"the character U+{ord(text[0]):04X}"
    return Diagnostic("T107", f"{shown} is not part of the language", token.span(path), _INSTEAD.get(text, ""))
