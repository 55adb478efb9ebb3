"""Expressions to values: names, arithmetic, `with` overrides and sums of layers, within fixed limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from titan.compiler.spec.report import Refusal, Report, similar
from titan.compiler.spec.scope import SLOTS, Scope, importable
from titan.compiler.spec.values import (
    Applied,
    Broken,
    Field,
    Items,
    Layers,
    Record,
    Scalar,
    Text,
    Value,
    Word,
    describe,
)
from titan.grammar import syntax
from titan.grammar.diagnostics import Note, Span
from titan.grammar.sources import library_path

MAX_DEPTH = 64  # nested blocks and definitions that lead to definitions
MAX_GROUPS = 4096  # terms in a sum of layers


class Evaluator:
    """Evaluates definitions on demand, each once; errors go to the report and leave a broken value behind."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.active: list[tuple[str, str]] = []
        self.depth = 0

    def definition(self, scope: Scope, name: str) -> Value:
        """The value of a definition or section of a file."""
        scope.used.add(name)
        if name not in scope.values:
            statement = scope.definitions[name]
            span = statement.name.span if isinstance(statement, syntax.Section) else statement.key.span
            if (scope.path, name) in self.active:
                circle = " -> ".join([n for _, n in self.active[self.active.index((scope.path, name)) :]] + [name])
                raise Refusal("T221", f"`{name}` is defined by itself: {circle}", span)
            self.active.append((scope.path, name))
            scope.values[name] = self._guarded(lambda: self._defined(scope, name, statement), span)
            self.active.pop()
        return scope.values[name]

    def _defined(self, scope: Scope, name: str, statement: syntax.Entry | syntax.Section) -> Value:
        if isinstance(statement, syntax.Section):
            return Record(name, self._fields(statement.entries, scope), statement.name.span, name)
        if statement.relation != "=":
            raise Refusal("T223", f"a definition is written `{name} = ...`", statement.span)
        value = self.evaluate(statement.value, scope)
        if isinstance(value, Record) and (name not in SLOTS or not value.name):
            value = replace(value, name=name)
        return value

    def _guarded(self, make: Callable[[], Value], span: Span) -> Value:
        try:
            return make()
        except Refusal as refusal:
            self.report.add(refusal.diagnostic)
            return Broken(span)

    def evaluate(self, expression: syntax.Expression, scope: Scope) -> Value:
        """The value of an expression in the names of `scope`."""
        self.depth += 1
        try:
            if self.depth > MAX_DEPTH:
                raise Refusal("T221", f"more than {MAX_DEPTH} levels deep", expression.span)
            return self._evaluate(expression, scope)
        finally:
            self.depth -= 1

    def _evaluate(self, expression: syntax.Expression, scope: Scope) -> Value:
        match expression:
            case syntax.Quantity(span, value, dimension, text):
                return Scalar(value, dimension, text, span)
            case syntax.String(span, value):
                return Text(value, span)
            case syntax.Name():
                return self._name(expression, scope)
            case syntax.ListOf(span, items):
                return Items(tuple(self.evaluate(item, scope) for item in items), span)
            case syntax.Call(span, name, arguments):
                return Applied(name.dotted, tuple(self.evaluate(a, scope) for a in arguments), span)
            case syntax.Block(span, name, entries):
                kind = name.dotted if name else ""
                return Record(kind, self._fields(entries, scope), name.span if name else head(span))
            case syntax.With(_, base, entries):
                return self._with(self.evaluate(base, scope), base.span, entries, scope)
            case syntax.Binary():
                return self._sum(expression, scope)

    # names

    def _name(self, name: syntax.Name, scope: Scope) -> Value:
        first, rest = name.parts[0], name.parts[1:]
        if first in scope.definitions and not (rest and first in scope.modules):  # `cluster = cluster.here`
            return self._inside(self.definition(scope, first), rest, name)
        if first in scope.modules:
            module = scope.modules[first]
            if module.broken:
                return Broken(name.span)
            if rest and rest[0] in module.failed:
                return Broken(name.span)
            if not rest or rest[0] not in module.definitions:
                raise _unknown(name, module.definitions, f"`{first}` defines")
            return self._inside(self.definition(module, rest[0]), rest[1:], name)
        if first in scope.failed or (rest and similar(first, scope.failed)):
            return Broken(name.span)
        if rest:
            raise _unknown(name, [*scope.modules, *scope.definitions], "known here:", _imports(first))
        return Word(first, name.span)

    def _inside(self, value: Value, keys: tuple[str, ...], name: syntax.Name) -> Value:
        for key in keys:
            if isinstance(value, Broken):
                return value
            if not isinstance(value, Record) or key not in value.fields:
                raise _unknown(name, value.fields if isinstance(value, Record) else (), "there are")
            value = value.fields[key].value
        return value

    # blocks

    def _fields(self, entries: tuple[syntax.Entry, ...], scope: Scope) -> dict[str, Field]:
        return self._assigned({}, entries, scope)

    def _with(self, base: Value, span: Span, entries: tuple[syntax.Entry, ...], scope: Scope) -> Value:
        if isinstance(base, Broken):
            return base
        if not isinstance(base, Record):
            raise Refusal("T226", f"`with` changes a block, but this is {describe(base)}", span)
        return replace(base, fields=self._assigned(base.fields, entries, scope))

    def _assigned(self, base: dict[str, Field], entries: tuple[syntax.Entry, ...], scope: Scope) -> dict[str, Field]:
        """`base` with each entry set; keys may be dotted, and none may be set twice."""
        fields, seen = dict(base), dict[tuple[str, ...], Span]()
        for entry in entries:
            parts = entry.key.parts
            clash = next((span for other, span in seen.items() if _covers(other, parts)), None)
            if clash is not None:
                note = (Note("first here", clash),)
                self.report.error("T213", f"`{entry.key.dotted}` is given twice", entry.key.span, notes=note)
                continue
            seen[parts] = entry.key.span
            value = self._guarded(lambda e=entry: self.evaluate(e.value, scope), entry.value.span)  # type: ignore[misc]
            new = Field(entry.key.span, entry.relation, value)
            try:
                fields = _put(fields, parts, new)
            except Refusal as refusal:
                self.report.add(refusal.diagnostic)
        return fields

    # arithmetic

    def _sum(self, expression: syntax.Binary, scope: Scope) -> Value:
        """Left to right without recursion on the left, so that a long sum is no deep one."""
        chain: list[syntax.Binary] = []
        left: syntax.Expression = expression
        while isinstance(left, syntax.Binary):
            chain.append(left)
            left = left.left
        value = self.evaluate(left, scope)
        for node in reversed(chain):
            value = combine(node.operator, value, self.evaluate(node.right, scope), node.span)
        return value


def combine(operator: str, left: Value, right: Value, span: Span) -> Value:
    """`left operator right`: numbers with numbers, whole numbers times blocks, blocks plus blocks."""
    if isinstance(left, Broken) or isinstance(right, Broken):
        return Broken(span)
    if isinstance(left, Scalar) and isinstance(right, Scalar):
        return _arithmetic(operator, left, right, span)
    if operator == "*" and isinstance(right, Scalar):
        left, right = right, left
    if operator == "*" and isinstance(left, Scalar) and isinstance(right, Record | Layers):
        return _repeated(left, right, span)
    if operator == "+" and isinstance(left, Record | Layers) and isinstance(right, Record | Layers):
        return _limited(Layers(_groups(left) + _groups(right), span))
    raise Refusal("T222", f"{describe(left)} {operator} {describe(right)} has no meaning", span)


def _arithmetic(operator: str, left: Scalar, right: Scalar, span: Span) -> Scalar:
    a, b = left.value, right.value
    dimension = left.dimension or right.dimension
    if operator in "+-" and left.dimension != right.dimension:
        raise Refusal("T222", f"{left.text} {operator} {right.text} mixes units", span)
    if operator == "*" and left.dimension and right.dimension:
        raise Refusal("T222", f"{left.text} * {right.text} multiplies two units", span)
    if operator == "/" and right.dimension:
        if left.dimension != right.dimension:
            raise Refusal("T222", f"{left.text} / {right.text} mixes units", span)
        dimension = ""
    if operator == "/" and not b:
        raise Refusal("T222", f"{left.text} / {right.text} divides by zero", span)
    try:
        value = {"+": a + b, "-": a - b, "*": a * b, "/": (_divided(a, b) if b else 0)}[operator]
    except OverflowError:
        value = math.inf
    if abs(value) >= 2**63 and (isinstance(value, int) or not math.isfinite(value)):
        raise Refusal("T222", f"{left.text} {operator} {right.text} is too large", span)
    return Scalar(value, dimension, f"{value} {dimension}".strip(), span)


def _divided(a: int | float, b: int | float) -> int | float:
    return a // b if isinstance(a, int) and isinstance(b, int) and a % b == 0 else a / b


def _groups(value: Record | Layers) -> tuple[tuple[Scalar, Record], ...]:
    return value.groups if isinstance(value, Layers) else ((Scalar(1, "", "1", value.span), value),)


def _repeated(count: Scalar, value: Record | Layers, span: Span) -> Layers:
    if isinstance(value, Record):
        return Layers(((count, value),), span)
    if count.dimension or not isinstance(count.value, int) or count.value < 1:
        raise Refusal("T222", f"layers are repeated a whole number of times, not {count.text}", count.span)
    if count.value * len(value.groups) > MAX_GROUPS:
        raise Refusal("T236", f"more than {MAX_GROUPS} groups of layers", span)
    return Layers(value.groups * count.value, span)


def _limited(layers: Layers) -> Layers:
    if len(layers.groups) > MAX_GROUPS:
        raise Refusal("T236", f"more than {MAX_GROUPS} groups of layers", layers.span)
    return layers


def _covers(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Is one key the other, or does it enclose it?"""
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]


def _put(fields: dict[str, Field], parts: tuple[str, ...], new: Field) -> dict[str, Field]:
    """A copy of `fields` with the dotted key set; missing blocks on the way are made."""
    first = parts[0]
    if len(parts) == 1:
        return fields | {first: new}
    inner = fields[first].value if first in fields else Record("", {}, new.key)
    if isinstance(inner, Broken):
        return fields
    if not isinstance(inner, Record):
        raise Refusal("T226", f"`{first}` is {describe(inner)}, which has no keys", new.key)
    key = fields[first].key if first in fields else new.key
    return fields | {first: Field(key, "=", replace(inner, fields=_put(inner.fields, parts[1:], new)))}


def _imports(first: str) -> tuple[str, ...]:
    """The imports that would define a name as one of the shipped library's files."""
    return tuple(f"import {name}" for name in importable([library_path()]) if name.endswith(f".{first}"))


def _unknown(name: syntax.Name, known: object, intro: str, imports: tuple[str, ...] = ()) -> Refusal:
    names = [str(k) for k in known]  # type: ignore[attr-defined]
    near = tuple(".".join((*name.parts[:-1], s)) if len(name.parts) > 1 else s for s in similar(name.parts[-1], names))
    near = imports or near or similar(name.parts[0], names)
    notes = (Note(f"{intro} {', '.join(names[:20])}"),) if names else ()
    return Refusal("T210", f"unknown name `{name.dotted}`", name.span, near, notes)


def head(span: Span) -> Span:
    """The first character of a block, to point at it as a whole."""
    return span if span.line == span.end_line else Span(span.path, span.line, span.column, span.line, span.column + 1)
