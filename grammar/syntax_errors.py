"""What to say where the grammar has no place for a token: the situation decides the code and the words."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import NamedTuple

from titan.grammar.diagnostics import Diagnostic, Span
from titan.grammar.scanner import CLOSERS, KEYWORDS, OPENERS, VALUE_ENDS, Token
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
_AFTER_NAME = _ENDS | {"RELATION", "LBRACE"}
_BEGINS_ENTRY = frozenset({"NAME", "QUANTITY", "STRING", "DIRECTION", "IMPORT", "LBRACE", "LSQB"})


class Situation(NamedTuple):
    """`token` stands between `before` and `after`, inside the bracket `inside`, where only `expected` may stand."""

    before: Token
    token: Token
    after: Token
    inside: str
    expected: frozenset[str]

    @property
    def line(self) -> int:
        return self.before.line if self.is_behind else self.token.line

    @property
    def is_behind(self) -> bool:
        """What is missing at the end of a line is shown there, not on the next line."""
        return self.token.type in ("_NEWLINE", END) or (self.token.type in _ENDS and self.token.line > self.before.line)

    def place(self, path: str) -> Span:
        if not self.is_behind:
            return self.token.span(path)
        column = self.before.column + len(self.before.text)
        return Span(path, self.before.line, column, self.before.line, column + 1)


def situation(tokens: list[Token], index: int, expected: Iterable[str]) -> Situation:
    """LALR merges states, so `expected` may hold separators and brackets of other places; they are taken out."""
    stack: list[str] = []
    for token in tokens[:index]:
        if token.type in OPENERS:
            stack.append(token.type)
        elif token.type in CLOSERS and stack:
            stack.pop()
    inside = stack[-1] if stack else ""
    wrong = {closer for opener, closer in OPENERS.items() if opener != inside}
    wrong |= {"": {"COMMA"}, "LBRACE": {END}}.get(inside, {END, "_NEWLINE"})
    token = tokens[index]
    before = tokens[index - 1] if index else Token("_NEWLINE", "", token.line, token.column)
    after = tokens[index + 1] if index + 1 < len(tokens) else token
    return Situation(before, token, after, inside, frozenset(expected) - wrong)


def unexpected(at: Situation, path: str) -> Diagnostic:
    """What is wrong in this situation; the order of the questions matters."""
    place, before, token, expected = at.place(path), at.before, at.token, at.expected
    if token.type == "BAD":
        return Diagnostic("T107", f"`{token.text}` is not part of the language", place)
    if "NAME" in expected and token.text in KEYWORDS and at.after.type in _AFTER_NAME:
        message = f"`{token.text}` is a word of the language and cannot be a name"
        return Diagnostic("T114", message, place, "choose another name")
    if token.type in ("IMPORT", "DIRECTION") and at.inside:
        return Diagnostic("T116", f"`{token.text}` stands inside a block", place, "it belongs to the top level")
    if before.type in ("RELATION", "SUM", "PRODUCT") and token.type in _ENDS:
        return Diagnostic("T102", f"`{before.text}` has no value behind it", place, "a value is missing here")
    if before.type == "NAME" and "RELATION" in expected:
        return _no_relation(before, token, place)
    if before.type in VALUE_ENDS and token.type in _BEGINS_ENTRY:
        return _no_separator(at, place)
    expects = _either(_expectations(expected))
    return Diagnostic("T101", f"{_found(token)} is not expected here", place, f"expected {expects}" if expects else "")


def _no_relation(before: Token, token: Token, place: Span) -> Diagnostic:
    name = before.text
    if token.type == "LBRACE":
        return Diagnostic("T115", f"`{name}` has a block but no `=`", place, f"write `{name} = {{ ... }}`")
    if token.type in ("QUANTITY", "NAME", "STRING"):
        message = f"`{name}` and its value need a relation between them"
        return Diagnostic("T115", message, place, "`=`, `<=`, `>=` or `in`")
    return Diagnostic("T115", f"`{name}` alone is not an entry", place, f"write `{name} = ...`")


def _no_separator(at: Situation, place: Span) -> Diagnostic:
    if at.before.type == "QUANTITY" and at.after.type == "LBRACE":
        repeat = f"to repeat it, write `{at.before.text} * {at.token.text}`"
        return Diagnostic("T101", f"`{at.token.text}` is not expected here", place, repeat)
    what = {"": "statement", "LBRACE": "entry"}.get(at.inside, "value")
    where = {"": "the end of the line", "LBRACE": "a comma or the end of the line"}.get(at.inside, "a comma")
    message = f"{_found(at.token)} begins before the last {what} has ended"
    return Diagnostic("T103", message, place, f"{where} is missing here")


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
