"""Which ends of lines mean something: they end a statement or an entry, and nothing else.

Dropped are comments, ends of lines inside `[ ]` and `( )`, next to a brace or a comma, and between a line and one that
cannot stand alone (after an operator; before an operator, `with`, `of`, `and`, `subject to`).
"""

from __future__ import annotations

from titan.grammar.scanner import CLOSERS, OPENERS, VALUE_ENDS, Token

_GOES_ON_AFTER = frozenset({"AND", "_SUBJECT_TO"})
_WANTS_VALUE = frozenset({"SUM", "PRODUCT", "WITH"})  # goes on too, unless the next line clearly is an entry
_GOES_ON_BEFORE = frozenset({"SUM", "PRODUCT", "AND", "OF", "WITH", "_SUBJECT_TO", "COMMA"})
_BEGINS_STATEMENT = frozenset({"IMPORT", "DIRECTION", *CLOSERS})


def join_lines(tokens: list[Token]) -> tuple[list[Token], list[int]]:
    """The tokens for the parser, and the indices at which a statement or an entry may begin a line."""
    joined: list[Token] = []
    starts: list[int] = [0]
    inside: list[str] = []
    newline: Token | None = None
    indent = 1
    significant = [token for token in tokens if token.type != "COMMENT"]
    for index, token in enumerate(significant):
        if token.type == "_NEWLINE":
            newline = newline or token
            continue
        if not joined:
            indent = token.column
        elif newline and (not inside or inside[-1] == "LBRACE"):
            before = joined[-1].type
            if not continues(before, significant, index, indent):
                if before not in ("LBRACE", "COMMA") and token.type not in CLOSERS:
                    joined.append(newline)
                starts.append(len(joined))
                indent = token.column
        newline = None
        if token.type in OPENERS:
            inside.append(token.type)
        elif token.type in CLOSERS and inside:
            inside.pop()
        joined.append(token)
    return joined, starts


def continues(before: str, tokens: list[Token], index: int, indent: int) -> bool:
    """If the token at `index`, first of its line, goes on with what began in column `indent` and ends in `before`."""
    kind = tokens[index].type
    following = tokens[index + 1].type if index + 1 < len(tokens) else ""
    if kind in _GOES_ON_BEFORE and before in VALUE_ENDS and following != "RELATION":
        return True
    if before in _GOES_ON_AFTER:
        return True
    begins = kind in _BEGINS_STATEMENT or (kind == "NAME" and following == "RELATION")
    section = kind == "NAME" and following == "LBRACE" and tokens[index].column <= indent
    return before in _WANTS_VALUE and not begins and not section
