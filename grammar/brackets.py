"""Every bracket gets its partner: what is missing is reported once and put in, what is too much reported and left out.

Where the counts do not come out, indentation says where a block was meant to end; in a balanced file it means nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from titan.grammar.diagnostics import Diagnostic, Note, TitanError
from titan.grammar.scanner import CLOSERS, OPENERS, Token

DEEPEST = 50  # brackets within brackets

_NOT_IN_A_LIST = frozenset({"RELATION", "IMPORT", "DIRECTION"})
_SHOWN = {"LBRACE": "{", "RBRACE": "}", "LSQB": "[", "RSQB": "]", "LPAR": "(", "RPAR": ")"}


class _Open(NamedTuple):
    token: Token
    indent: int  # column of the first token on its line


def balance(tokens: list[Token], path: str, limit: int) -> tuple[list[Token], list[Diagnostic]]:
    """The tokens with matched brackets, and at most `limit` diagnostics; raises at once where nesting is too deep."""
    if _is_balanced(tokens, path):
        return tokens, []
    balancer = _Balancer(path)
    for index, token in enumerate(tokens):
        if index == 0 or tokens[index - 1].type == "_NEWLINE":
            balancer.start_line(token, tokens[index + 1].type if index + 1 < len(tokens) else "")
        balancer.feed(token)
        if len(balancer.problems) >= limit:
            return balancer.tokens, balancer.problems[:limit]
    balancer.finish()
    return balancer.tokens, balancer.problems[:limit]


def _is_balanced(tokens: list[Token], path: str) -> bool:
    """Also no: an entry within `[` or `(`, whose partner then stands in another entry."""
    expected: list[str] = []
    for token in tokens:
        if token.type in OPENERS:
            expected.append(OPENERS[token.type])
            _check_depth(len(expected), token, path)
        elif token.type in CLOSERS:
            if not expected or expected.pop() != token.type:
                return False
        elif token.type in _NOT_IN_A_LIST and expected and expected[-1] != "RBRACE":
            return False
    return not expected


def _check_depth(depth: int, token: Token, path: str) -> None:
    if depth > DEEPEST:
        message = f"brackets within brackets are {DEEPEST} deep at most"
        raise TitanError(Diagnostic("T108", message, token.span(path), f"level {depth}"))


class _Balancer:
    """Walks over the tokens with the stack of open brackets."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.tokens: list[Token] = []
        self.problems: list[Diagnostic] = []
        self.stack: list[_Open] = []
        self.indent = 1
        self.behind = Token("$END", "", 1, 1)  # the place behind the last token that is not the end of a line

    def start_line(self, token: Token, following: str) -> None:
        """No entry is inside `[` or `(`, and no line inside a bracket whose line it is level with or left of."""
        if token.type in ("_NEWLINE", "COMMENT"):
            return
        self.indent = token.column
        outside = token.type in ("RBRACE", "IMPORT", "DIRECTION") or (token.type == "NAME" and following == "RELATION")
        while self.stack and self.stack[-1].token.type != "LBRACE":
            if not outside and (token.column > self.stack[-1].indent or token.type in CLOSERS):
                break
            self.report_unclosed(self.stack.pop(), self.behind)
        while self.stack and self.stack[-1].token.type == "LBRACE":
            inside = self.stack[-1].indent
            if token.column > inside or (token.column == inside and token.type in CLOSERS):
                return
            self.report_unclosed(self.stack.pop(), token)

    def feed(self, token: Token) -> None:
        if token.type in CLOSERS:
            self.close(token)
        else:
            self.tokens.append(token)
        if token.type in OPENERS:
            self.stack.append(_Open(token, self.indent))
            _check_depth(len(self.stack), token, self.path)
        if token.type != "_NEWLINE":
            self.behind = Token("_NEWLINE", "", token.line, token.column + len(token.text))

    def close(self, token: Token) -> None:
        opener = CLOSERS[token.type]
        if not any(item.token.type == opener for item in self.stack):
            what = f"`{token.text}` closes nothing"
            self.problems.append(
                Diagnostic("T105", what, token.span(self.path), f"there is no open `{_SHOWN[opener]}`")
            )
            return
        while self.stack[-1].token.type != opener:
            self.report_unclosed(self.stack.pop(), token)
        self.stack.pop()
        self.tokens.append(token)

    def finish(self) -> None:
        while self.stack:
            self.report_unclosed(self.stack.pop(), self.behind._replace(type="$END"))

    def report_unclosed(self, item: _Open, place: Token) -> None:
        """Report at `place` and put the missing bracket behind what came last."""
        opener, closer = item.token, OPENERS[item.token.type]
        where = {"$END": "at the end of the file", "_NEWLINE": "here"}.get(place.type, "before this")
        label = f"`{_SHOWN[closer]}` is missing {where}"
        note = Note("opened here", opener.span(self.path))
        self.problems.append(
            Diagnostic("T104", f"`{opener.text}` is not closed", place.span(self.path), label, notes=(note,))
        )
        position = len(self.tokens)
        while position and self.tokens[position - 1].type in ("_NEWLINE", "COMMENT"):
            position -= 1
        self.tokens.insert(position, Token(closer, "", place.line, place.column))
