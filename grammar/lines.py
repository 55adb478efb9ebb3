"""Which ends of lines mean something: they end a statement or an entry, and nothing else.

Dropped are comments, ends of lines inside `[ ]` and `( )`, next to a brace or a comma, and between a line and one that
cannot stand alone (after an operator; before an operator, `with`, `of`, `and`, `subject to`).
"""

from __future__ import annotations

from titan.grammar.scanner import CLOSERS, OPENERS, Token

_GOES_ON_AFTER = frozenset({"AND", "_SUBJECT_TO"})
_WANTS_VALUE = frozenset({"SUM", "PRODUCT", "WITH"})  # goes on too, unless the next line clearly is an entry
_GOES_ON_BEFORE = frozenset({"SUM", "PRODUCT", "AND", "OF", "WITH", "_SUBJECT_TO", "COMMA"})


def join_lines(tokens: list[Token]) -> tuple[list[Token], list[int]]:
    """The tokens for the parser, and the indices at which a statement or an entry may begin a line."""
    joined: list[Token] = []
    starts: list[int] = [0]
    inside: list[str] = []
    newline: Token | None = None
    significant = [token for token in tokens if token.type != "COMMENT"]
    for index, token in enumerate(significant):
        if token.type == "_NEWLINE":
            newline = newline or token
            continue
        if newline and joined and (not inside or inside[-1] == "LBRACE"):
            before = joined[-1].type
            if not continues(before, significant, index):
                if before not in ("LBRACE", "COMMA") and token.type not in CLOSERS:
                    joined.append(newline)
                starts.append(len(joined))
        newline = None
        if token.type in OPENERS:
            inside.append(token.type)
        elif token.type in CLOSERS and inside:
            inside.pop()
        joined.append(token)
    return joined, starts


def continues(before: str, tokens: list[Token], index: int) -> bool:
    """Whether the token at `index`, first of its line, goes on with what ends in a token of type `before`."""
    if tokens[index].type in _GOES_ON_BEFORE:
        return True
    following = tokens[index + 1].type if index + 1 < len(tokens) else ""
    begins_entry = tokens[index].type == "NAME" and following == "RELATION"
    return before in _GOES_ON_AFTER or (before in _WANTS_VALUE and not begins_entry)
