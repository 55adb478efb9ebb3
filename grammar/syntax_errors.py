"""What to say where the grammar has no place for a token: the situation decides the code and the words."""

from __future__ import annotations

from collections.abc import Container

from titan.grammar.diagnostics import Diagnostic, Span
from titan.grammar.scanner import KEYWORDS, VALUE_ENDS, Token
from titan.grammar.tables import END

_WORDS = {
    "NAME": "a name", "QUANTITY": "a number", "STRING": "a string", "RELATION": "`=`, `<=`, `>=` or `in`",
    "SUM": "`+` or `-`", "PRODUCT": "`*` or `/`", "DIRECTION": "`minimize` or `maximize`", "IMPORT": "`import`",
    "WITH": "`with`", "OF": "`of`", "AND": "`and`", "COMMA": "`,`", "LBRACE": "`{`", "RBRACE": "`}`", "LSQB": "`[`",
    "RSQB": "`]`", "LPAR": "`(`", "RPAR": "`)`",
    "_NEWLINE": "the end of the line", "_SUBJECT_TO": "`subject to`", END: "the end of the file",
}  # fmt: skip
_VALUE = ("NAME", "QUANTITY", "STRING", "LBRACE", "LSQB", "LPAR")
_OPERATORS = frozenset({"SUM", "PRODUCT", "WITH", "OF"})  # may follow any value: naming them does not help
_ENDS = frozenset({"_NEWLINE", "COMMA", "RBRACE", "RSQB", "RPAR", END})
_BEGINS_ENTRY = frozenset({"NAME", "QUANTITY", "STRING", "DIRECTION", "IMPORT", "LBRACE", "LSQB"})


def unexpected(before: Token | None, token: Token, after: Token, expected: Container[str], path: str) -> Diagnostic:
    """The diagnostic for `token`, which stands between `before` and `after` where only `expected` may stand."""
    place = _place(before, token, path)
    if token.type == "BAD":
        return Diagnostic("T107", f"`{token.text}` is not part of the language", place)
    if (
        "NAME" in expected
        and token.text in KEYWORDS
        and after.type in ("RELATION", "LBRACE", "COMMA", "RSQB", "_NEWLINE", "RBRACE")
    ):
        return Diagnostic("T114", f"`{token.text}` is a word of the language and cannot be a name", place)
    if token.type in ("IMPORT", "DIRECTION") and "IMPORT" not in expected and "NAME" in expected:
        return Diagnostic("T116", f"`{token.text}` stands inside a block", place, "it belongs to the top level")
    if before and before.type in ("RELATION", "SUM", "PRODUCT") and token.type in _ENDS:
        return Diagnostic("T102", f"`{before.text}` has no value behind it", place, "a value is missing here")
    if before and before.type == "NAME" and "RELATION" in expected:
        return _no_relation(before, token, place)
    if before and before.type in VALUE_ENDS and token.type in _BEGINS_ENTRY and "_NEWLINE" in expected:
        return _no_separator(before, token, after, place, expected)
    expects = _either(_expectations(expected))
    return Diagnostic("T101", f"{_found(token)} is not expected here", place, f"expected {expects}" if expects else "")


def _place(before: Token | None, token: Token, path: str) -> Span:
    """Ends of lines and of the file are shown behind the last token of their line."""
    if before and token.type in ("_NEWLINE", END) and token.line >= before.line:
        column = before.column + len(before.text)
        return Span(path, before.line, column, before.line, column + 1)
    return token.span(path)


def _no_relation(before: Token, token: Token, place: Span) -> Diagnostic:
    name = before.text
    if token.type == "LBRACE":
        return Diagnostic("T115", f"`{name}` has a block but no `=`", place, f"write `{name} = {{ ... }}`")
    if token.type in ("QUANTITY", "NAME", "STRING"):
        return Diagnostic(
            "T115", f"`{name}` and its value need a relation between them", place, "`=`, `<=`, `>=` or `in`"
        )
    return Diagnostic("T115", f"`{name}` alone is not an entry", place, f"write `{name} = ...`")


def _no_separator(before: Token, token: Token, after: Token, place: Span, expected: Container[str]) -> Diagnostic:
    where = "a comma or the end of the line" if "COMMA" in expected else "the end of the line"
    if before.type == "QUANTITY" and after.type == "LBRACE":
        return Diagnostic(
            "T101", f"`{token.text}` is not expected here", place, f"to repeat it, write `{before.text} * {token.text}`"
        )
    return Diagnostic(
        "T103", f"{_found(token)} begins before the last entry has ended", place, f"{where} is missing here"
    )


def _found(token: Token) -> str:
    return _WORDS[token.type] if token.type in ("_NEWLINE", END) else f"`{token.text[:40]}`"


def _expectations(expected: Container[str]) -> list[str]:
    """In words; all that may begin a value is just a value."""
    value = all(kind in expected for kind in _VALUE)
    hidden = {*_OPERATORS, *(_VALUE if value else ())}
    return ["a value"] * value + [text for kind, text in _WORDS.items() if kind in expected and kind not in hidden]


def _either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}" if words else ""


def too_large(size: int, limit: int, path: str) -> Diagnostic:
    return Diagnostic("T121", f"{path} has {size:,} characters and a spec has {limit:,} at most")


def too_deep(limit: int, span: Span) -> Diagnostic:
    return Diagnostic("T109", f"expressions within expressions are {limit} deep at most", span)
