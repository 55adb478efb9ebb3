"""Source to syntax tree: scanner, brackets, lines, and an LALR(1) automaton over the table of `titan.lark`.

An error costs its own line: the automaton goes back to the start of the line, leaves the line out and goes on, so that a file
shows all its errors at once and none of them twice.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from titan.grammar import syntax_errors
from titan.grammar.brackets import balance
from titan.grammar.diagnostics import Diagnostic, Note, Span, TitanError
from titan.grammar.lines import join_lines
from titan.grammar.nodes import BUILDERS
from titan.grammar.scanner import CLOSERS, OPENERS, Token, scan
from titan.grammar.syntax import SyntaxTree
from titan.grammar.tables import END, Rule, Table, load_table

LARGEST_SOURCE = 1 << 20  # characters
_MOST_ERRORS = 20
_DEEPEST_TREE = 200  # nodes within nodes: who walks over a tree may recurse

table = cache(load_table)


def parse(source: str, path: str) -> SyntaxTree:
    """The tree of `source`; raises `TitanError` with everything that is wrong, sorted by place."""
    if len(source) > LARGEST_SOURCE:
        raise TitanError(syntax_errors.too_large(len(source), LARGEST_SOURCE, path))
    scanned, problems = scan(source, path, _MOST_ERRORS)
    if len(problems) < _MOST_ERRORS:
        balanced, unbalanced = balance(scanned, path, _MOST_ERRORS - len(problems))
        problems += unbalanced
        if len(problems) < _MOST_ERRORS:
            tokens, starts = join_lines(balanced)
            parsing = _Parsing(path, tokens, starts, problems)
            parsing.run()
            if not problems:
                return SyntaxTree(path, source, parsing.result)
    raise TitanError(_sorted(problems))


def _sorted(problems: list[Diagnostic]) -> list[Diagnostic]:
    problems.sort(key=lambda d: (d.span.line, d.span.column) if d.span else (0, 0))
    if len(problems) >= _MOST_ERRORS:
        last = problems[_MOST_ERRORS - 1]
        more = Note(f"there may be more: only the first {_MOST_ERRORS} errors are shown")
        problems[_MOST_ERRORS - 1 :] = [
            Diagnostic(last.code, last.message, last.span, last.label, last.nearest, (*last.notes, more))
        ]
    return problems


class _Frame(NamedTuple):
    """The automaton's stack, linked and never changed, so that any earlier stack can be kept for going back."""

    state: int
    value: Any
    start: Token
    end: Token
    depth: int
    below: _Frame | None


class _Parsing:
    """One run of the automaton; nodes are only made while there is no error."""

    def __init__(self, path: str, tokens: list[Token], starts: list[int], problems: list[Diagnostic]) -> None:
        last = tokens[-1] if tokens else Token(END, "", 1, 1)
        self.path = path
        self.tokens = [*tokens, Token(END, "", last.line, last.column + len(last.text))]
        self.starts = frozenset(starts)
        self.problems = problems
        self.failed_lines = {d.span.line for d in problems if d.span}
        self.table: Table = table()
        self.top = _Frame(0, None, last, last, 0, None)
        self.result: Any = ()

    def run(self) -> None:
        index, line_start, line_top = 0, 0, self.top
        while index < len(self.tokens):
            if index in self.starts:
                line_start, line_top = index, self.top
            if self.feed(self.tokens[index]):
                index += 1
                continue
            self.report(index)
            if len(self.problems) >= _MOST_ERRORS or self.tokens[index].type == END:
                return
            self.top = line_top
            index = self.skip_line(line_start, index)
        self.result = self.top.value if not self.problems else ()

    def feed(self, token: Token) -> bool:
        """Shift `token` after the reductions that it calls for; False where the grammar has no place for it."""
        actions, kind = self.table.actions, token.type
        while True:
            action = actions[self.top.state].get(kind)
            if action is None:
                return kind == END and self.top.state == self.table.accepting
            if action >= 0:
                self.top = _Frame(action, token, token, token, 0, self.top)
                return True
            self.reduce(self.table.rules[~action], token)

    def reduce(self, rule: Rule, ahead: Token) -> None:
        frames: list[_Frame] = []
        below = self.top
        for _ in rule.keep:
            frames.append(below)
            assert below.below is not None
            below = below.below
        frames.reverse()
        first, last = (frames[0].start, frames[-1].end) if frames else (ahead, ahead)
        depth = max([frame.depth for frame in frames], default=0)
        value: Any = None
        if not self.problems:
            value, depth = self.build(rule, frames, first, last, depth)
        goto = self.table.actions[below.state][rule.origin]
        self.top = _Frame(goto, value, first, last, depth, below)

    def build(self, rule: Rule, frames: list[_Frame], first: Token, last: Token, depth: int) -> tuple[Any, int]:
        kept = [frame.value for frame, keep in zip(frames, rule.keep, strict=True) if keep]
        if rule.transparent and len(kept) == 1:
            return kept[0], depth
        children = _splice(kept)
        if rule.spliced:
            return children, depth
        span = Span(self.path, first.line, first.column, last.line, last.column + len(last.text))
        if depth >= _DEEPEST_TREE:
            raise TitanError(syntax_errors.too_deep(_DEEPEST_TREE, span))
        return BUILDERS[rule.builder](span, children), depth + 1

    def report(self, index: int) -> None:
        """Say what is wrong at `index`, unless its line has already been found wrong."""
        token = self.tokens[index]
        before = self.tokens[index - 1] if index else None
        lines = {token.line} if token.type not in ("_NEWLINE", END) or before is None else {before.line}
        if (token.type == END and self.problems and self.top.below is None) or lines & self.failed_lines:
            return
        self.failed_lines |= lines
        expected = self.table.actions[self.top.state]
        after = self.tokens[index + 1] if index + 1 < len(self.tokens) else token
        self.problems.append(syntax_errors.unexpected(before, token, after, expected, self.path))

    def skip_line(self, first: int, failed: int) -> int:
        """Leave out the lines from token `first` on, to the end of what was opened on them; what they close is closed."""
        depth, closers, index = 0, [], first
        while index < len(self.tokens) - 1:
            token = self.tokens[index]
            if index > failed and index in self.starts and depth == 0:
                break
            if token.type in OPENERS:
                depth += 1
            elif token.type in CLOSERS:
                depth -= 1
                if depth < 0:
                    closers.append(token)
                    depth = 0
            index += 1
        closed = [self.feed(closer) for closer in closers]
        ended = self.tokens[index - 1]
        if closed and ended.type == "_NEWLINE":
            self.feed(ended)
        return index


def _splice(values: list[Any]) -> list[Any]:
    """Lists of spliced rules become part of their parent's; the first is grown in place, so long lists cost linear time."""
    if not any(isinstance(value, list) for value in values):
        return values
    out: list[Any] = values[0] if isinstance(values[0], list) else [values[0]]
    for value in values[1:]:
        if isinstance(value, list):
            out.extend(value)
        else:
            out.append(value)
    return out
