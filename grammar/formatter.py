"""One way to write a spec: `format_source` keeps comments and line breaks, and settles spaces and indentation.

Rules: four spaces per bracket level (also for a line that goes on); one blank line where there were several, none at
the edges of a block or of the file; relations of neighbouring entries stand below each other (`=` in one column, `<=`
ending in it, `in` beginning in it; a blank line ends a neighbourhood); comments behind code do too, where each line of
a run has one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from titan.grammar.lines import continues
from titan.grammar.parser import parse
from titan.grammar.scanner import CLOSERS, OPENERS, Token, scan

_INDENT = 4
_TIGHT_AFTER = frozenset({"LSQB", "LPAR"})
_TIGHT_BEFORE = frozenset({"COMMA", "RSQB", "RPAR"})


@dataclass(slots=True)
class _Line:
    """A line to write: `tokens` without its comment; `level` is its indentation, `blank` a blank line before it."""

    tokens: list[Token] = field(default_factory=list)
    comment: str = ""
    level: int = 0
    blank: bool = False
    block: int = -1  # the innermost open `{`, as a number; entries of one block are neighbours
    column: int = 0  # where the `=` of an entry belongs; 0 for all other lines


def format_source(source: str, path: str) -> str:
    """`source`, well laid out; raises `TitanError` where it does not parse. Formatting twice changes nothing."""
    parse(source, path)
    lines = _indent(_tidy(_split(scan(source, path, 1)[0])))
    _align(lines)
    codes = [_write(line) for line in lines]
    widths = _comment_columns(lines, codes)
    texts = [_with_comment(line, code, width) for line, code, width in zip(lines, codes, widths, strict=True)]
    return "".join(("\n" if line.blank else "") + text + "\n" for line, text in zip(lines, texts, strict=True))


def _split(tokens: list[Token]) -> list[_Line]:
    """Tokens by lines; the blank lines before a line become one flag of it."""
    lines: list[_Line] = []
    line, blank = _Line(), False
    for token in [*tokens, Token("_NEWLINE", "", 0, 0)]:
        if token.type == "COMMENT":
            line.comment = token.text.rstrip()
        elif token.type != "_NEWLINE":
            line.tokens.append(token)
        elif line.tokens or line.comment:
            line.blank, blank = blank and bool(lines), False
            lines.append(line)
            line = _Line()
        else:
            blank = True
    return lines


def _tidy(lines: list[_Line]) -> list[_Line]:
    """Without commas that an end of line or a closing bracket makes idle, and blank lines at the edges of brackets."""
    inside: list[str] = []
    for line in lines:
        line.tokens = _drop_commas(line.tokens, inside)
    lines = [line for line in lines if line.tokens or line.comment]
    for before, line in zip([_Line(), *lines], lines, strict=False):
        opened = bool(before.tokens) and before.tokens[-1].type in OPENERS
        if opened or (line.tokens and line.tokens[0].type in CLOSERS):
            line.blank = False
    return lines


def _drop_commas(tokens: list[Token], inside: list[str]) -> list[Token]:
    """`inside` are the open brackets; it is kept up to date."""
    kept: list[Token] = []
    for token in tokens:
        if token.type == "COMMA" and not kept and inside and inside[-1] == "LBRACE":
            continue
        if token.type in CLOSERS:
            inside.pop()
            if kept and kept[-1].type == "COMMA":
                kept.pop()
        elif token.type in OPENERS:
            inside.append(token.type)
        kept.append(token)
    if kept and kept[-1].type == "COMMA" and inside and inside[-1] == "LBRACE":
        kept.pop()
    return kept


@dataclass(frozen=True, slots=True)
class _Bracket:
    type: str
    level: int  # of the line that it stands on
    number: int


def _indent(lines: list[_Line]) -> list[_Line]:
    """Levels: inside a bracket one more than the line that opened it; a line that goes on, one more than its first."""
    stack: list[_Bracket] = []
    count, before, indent = 0, "_NEWLINE", 1
    for line in lines:
        inner = stack[-1] if stack else None
        leading = next((i for i, token in enumerate(line.tokens) if token.type not in CLOSERS), len(line.tokens))
        line.level = stack[-leading].level if leading else inner.level + 1 if inner else 0
        if inner is None or inner.type == "LBRACE":
            line.block = inner.number if inner else 0
            if line.tokens and continues(before, line.tokens, 0, indent):
                line.level, line.block = line.level + 1, -1
            elif line.tokens:
                indent = line.tokens[0].column
        for token in line.tokens:
            before = token.type
            if before in OPENERS:
                count += 1
                stack.append(_Bracket(before, line.level, count))
            elif before in CLOSERS:
                stack.pop()
    return lines


def _align(lines: list[_Line]) -> None:
    """Give the entries of each neighbourhood their common column."""
    open_groups: dict[int, list[_Line]] = {}
    groups: list[list[_Line]] = []
    for line in lines:
        if line.blank:
            open_groups.pop(line.block, None)
        if line.block >= 0 and [token.type for token in line.tokens[:2]] == ["NAME", "RELATION"]:
            if line.block not in open_groups:
                groups.append(open_groups.setdefault(line.block, []))
            open_groups[line.block].append(line)
    for group in groups:
        wide = any(entry.tokens[1].text in ("<=", ">=") for entry in group)
        column = max(len(entry.tokens[0].text) for entry in group) + (2 if wide else 1)
        for entry in group:
            entry.column = column


def _write(line: _Line) -> str:
    text = ""
    for index, token in enumerate(line.tokens):
        if index == 1 and line.column:
            start = line.column - (token.text in ("<=", ">="))
            text = text.ljust(start) + token.text
        else:
            text += (" " if index and _spaced(line.tokens[index - 1], token) else "") + _spelt(token)
    return " " * (_INDENT * line.level) + text


def _comment_columns(lines: list[_Line], codes: list[str]) -> list[int]:
    """Where the comment behind each line begins: in one column for lines that follow each other and all have one."""
    columns = [0] * len(lines)
    runs: list[list[int]] = []
    for index, line in enumerate(lines):
        if line.tokens and line.comment:
            if not runs or line.blank or runs[-1][-1] != index - 1:
                runs.append([])
            runs[-1].append(index)
    for run in runs:
        column = max(len(codes[index]) for index in run) + 2
        for index in run:
            columns[index] = column
    return columns


def _with_comment(line: _Line, code: str, column: int) -> str:
    return code.ljust(column) + line.comment if line.comment else code


def _spaced(before: Token, token: Token) -> bool:
    if before.type in _TIGHT_AFTER or token.type in _TIGHT_BEFORE:
        return False
    if token.type == "LPAR":
        return before.type != "NAME"
    return not (before.type == "LBRACE" and token.type == "RBRACE")


def _spelt(token: Token) -> str:
    """Quantities with single spaces inside, everything else as it was written."""
    return " ".join(token.text.split()) if token.type in ("QUANTITY", "_SUBJECT_TO") else token.text
