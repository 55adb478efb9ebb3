"""From a reduced rule of the grammar to its syntax node; one function per alternative, named as in `titan.lark`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from titan.grammar import syntax
from titan.grammar.diagnostics import Span
from titan.grammar.scanner import Token

Children = list[Any]


def _name(token: Token, path: str) -> syntax.Name:
    return syntax.Name(token.span(path), tuple(token.text.split(".")))


def _objective(span: Span, children: Children) -> syntax.Objective:
    direction, goal, *limits = children
    return syntax.Objective(span, direction.text, _name(goal, span.path), tuple(limits))


def _limit(span: Span, children: Children) -> syntax.Limit:
    key, relation, value, *of = children
    whose = _name(of[0], span.path) if of else None
    return syntax.Limit(span, _name(key, span.path), relation.text, value, whose)


def _entry(span: Span, children: Children) -> syntax.Entry:
    key, relation, value = children
    return syntax.Entry(span, _name(key, span.path), relation.text, value)


def _section(span: Span, children: Children) -> syntax.Section:
    return syntax.Section(span, _name(children[0], span.path), tuple(children[1:]))


def _block(span: Span, children: Children) -> syntax.Block:
    return syntax.Block(span, _name(children[0], span.path), tuple(children[1:]))


def _quantity(span: Span, children: Children) -> syntax.Quantity:
    value, dimension = children[0].value
    return syntax.Quantity(span, value, dimension, children[0].text)


def _call(span: Span, children: Children) -> syntax.Call:
    return syntax.Call(span, _name(children[0], span.path), tuple(children[1:]))


def _binary(span: Span, children: Children) -> syntax.Binary:
    left, operator, right = children
    return syntax.Binary(span, operator.text, left, right)


BUILDERS: dict[str, Callable[[Span, Children], Any]] = {
    "start": lambda span, children: tuple(children),
    "import_statement": lambda span, children: syntax.Import(span, _name(children[0], span.path)),
    "section": _section,
    "objective": _objective,
    "limit": _limit,
    "entry": _entry,
    "quantity": _quantity,
    "string": lambda span, children: syntax.String(span, children[0].value),
    "name": lambda span, children: _name(children[0], span.path),
    "block": _block,
    "bare_block": lambda span, children: syntax.Block(span, None, tuple(children)),
    "with_block": lambda span, children: syntax.With(span, children[0], tuple(children[1:])),
    "call": _call,
    "list_of": lambda span, children: syntax.ListOf(span, tuple(children)),
    "binary": _binary,
}
