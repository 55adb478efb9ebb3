"""Source to syntax tree: scanner, brackets, lines, and an LALR(1) automaton over the table of `titan.lark`.

An error costs its own line: the automaton goes back to the start of the line, leaves the line out and goes on, so that
a file shows all its errors at once and none of them twice.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from titan.grammar import syntax_errors
from titan.grammar.brackets import balance
from titan.grammar.diagnostics import Diagnostic, Note, Span, TitanError
from titan.grammar.lines import join_lines
from titan.grammar.nodes import BUILDERS
from titan.grammar.scanner import CLOSERS, OPENERS, Token, scan
from titan.grammar.sources import LARGEST_SOURCE
from titan.grammar.syntax import SyntaxTree
from titan.grammar.tables import END, Rule, Table, load_table

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


# The automaton's stack: (state, value, first token, last token, depth, the stack below). It is linked and never
# changed, so that any earlier stack can be kept for going back.
_Stack = tuple[int, Any, Token, Token, int, Any]


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
        self.stack: _Stack = (0, None, last, last, 0, None)
        self.result: Any = ()

    def run(self) -> None:
        """A closing bracket that begins a line still belongs to the line before: that is where something is missing."""
        index, line_start, line_stack, leading = 0, 0, self.stack, True
        while index < len(self.tokens):
            token = self.tokens[index]
            leading = leading or index in self.starts
            if index in self.starts and token.type not in CLOSERS:
                line_start, line_stack = index, self.stack
            if self.feed(token):
                index += 1
                leading = leading and token.type in CLOSERS
                if leading:
                    line_start, line_stack = index, self.stack
                continue
            self.report(index)
            if len(self.problems) >= _MOST_ERRORS or token.type == END:
                return
            self.stack = line_stack
            index = self.skip_line(line_start, index)
            line_start, line_stack, leading = index, self.stack, True
        self.result = self.stack[1] if not self.problems else ()

    def feed(self, token: Token) -> bool:
        """Shift `token` after the reductions that it calls for; False where the grammar has no place for it."""
        actions, rules, kind = self.table.actions, self.table.rules, token.type
        while True:
            state = self.stack[0]
            action = actions[state].get(kind)
            if action is None:
                return kind == END and state == self.table.accepting
            if action >= 0:
                self.stack = (action, token, token, token, 0, self.stack)
                return True
            rule = rules[~action]
            if rule.passes:
                _, value, first, last, depth, below = self.stack
                self.stack = (actions[below[0]][rule.origin], value, first, last, depth, below)
            else:
                self.stack = self.reduce(rule, token)

    def reduce(self, rule: Rule, ahead: Token) -> _Stack:
        """The stack with the frames of `rule`'s symbols replaced by one with its node, or its list if it is spliced."""
        kept: list[Any] = []
        below, depth, first, last = self.stack, 0, ahead, self.stack[3] if rule.keep else ahead
        for keep in reversed(rule.keep):
            _, value, first, _, deep, below = below
            if keep:
                kept.append(value)
                depth = max(depth, deep)
        if self.problems:
            node = None  # there will be no tree
        elif rule.transparent and len(kept) == 1:
            node = kept[0]
        elif rule.spliced:
            node = _splice(kept)
        else:
            depth += 1
            span = Span(self.path, first.line, first.column, last.line, last.column + len(last.text))
            if depth > _DEEPEST_TREE:
                raise TitanError(syntax_errors.too_deep(_DEEPEST_TREE, span))
            node = BUILDERS[rule.builder](span, _splice(kept))
        return (self.table.actions[below[0]][rule.origin], node, first, last, depth, below)

    def report(self, index: int) -> None:
        """Say what is wrong at `index`, unless its line has already been found wrong."""
        situation = syntax_errors.situation(self.tokens, index, self.table.actions[self.stack[0]])
        line = situation.line
        if line not in self.failed_lines:
            self.failed_lines.add(line)
            self.problems.append(syntax_errors.unexpected(situation, self.path))

    def skip_line(self, first: int, failed: int) -> int:
        """Leave out the lines from token `first` on, to the end of what they open; what they close is closed."""
        depth, closers, index = 0, [], first
        while index < len(self.tokens) - 1:
            token = self.tokens[index]
            if index > first and index >= failed and index in self.starts and depth == 0:
                break
            if token.type in OPENERS:
                depth += 1
            elif token.type in CLOSERS and depth:
                depth -= 1
            elif token.type in CLOSERS:
                closers.append(token)
            index += 1
        for closer in closers:
            self.feed(closer)
        if self.tokens[index - 1].type == "_NEWLINE":
            self.feed(self.tokens[index - 1])  # no effect where a statement or an entry may begin at once
        return index


def _splice(backward: list[Any]) -> list[Any]:
    """Values from last to first, as one list in order; lists are taken apart, and the first grows in place."""
    first = backward.pop() if backward else []
    out: list[Any] = first if isinstance(first, list) else [first]
    for value in reversed(backward):
        if isinstance(value, list):
            out.extend(value)
        else:
            out.append(value)
    return out
