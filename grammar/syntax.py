"""Syntax nodes: what was written in a `.titan` file, nothing resolved. Every node carries its `Span`."""

from __future__ import annotations

from typing import NamedTuple

from titan.grammar.diagnostics import Span


class Quantity(NamedTuple):
    """A number with an optional unit, lexed as one token: `80 GiB`, `400 Gb/s`, `4Mi tokens`, `92%`, `3e-4`.

    `value` is in base units (bytes, bytes per second, FLOP/s, seconds, tokens, fraction for `%`); `dimension` names the
    kind: "" (plain number), "bytes", "bytes/s", "flops", "flop/s", "seconds", "tokens", "sequences",
    "tokens/s", "fraction", "money", "money/hour".
    `value` is an int whenever the written number is a whole number of base units, else a float.
    """

    span: Span
    value: int | float
    dimension: str
    text: str


class String(NamedTuple):
    span: Span
    value: str


class Name(NamedTuple):
    """A dotted name: `llama.llama3_70b`, `auto`, `bf16`, `true`."""

    span: Span
    parts: tuple[str, ...]

    @property
    def dotted(self) -> str:
        return ".".join(self.parts)


class ListOf(NamedTuple):
    span: Span
    items: tuple[Expression, ...]


class Call(NamedTuple):
    """`tokens("corpus.bin")`: a name applied to positional arguments."""

    span: Span
    name: Name
    arguments: tuple[Expression, ...]


class Block(NamedTuple):
    """`adamw { learning_rate = 3e-4 }`; a bare `{ ... }` has an empty name."""

    span: Span
    name: Name | None
    entries: tuple[Entry, ...]


class With(NamedTuple):
    """`base with { nodes = 128 }`."""

    span: Span
    base: Expression
    entries: tuple[Entry, ...]


class Binary(NamedTuple):
    """`left operator right` with operator one of + - * /."""

    span: Span
    operator: str
    left: Expression
    right: Expression


Expression = Quantity | String | Name | ListOf | Call | Block | With | Binary


class Entry(NamedTuple):
    """`key relation value` inside a block or at the top level; relation is one of `=`, `<=`, `>=`, `in`."""

    span: Span
    key: Name
    relation: str
    value: Expression


class Import(NamedTuple):
    span: Span
    name: Name


class Section(NamedTuple):
    """A top-level named block: `train { ... }`, `parallel { ... }`."""

    span: Span
    name: Name
    entries: tuple[Entry, ...]


class Limit(NamedTuple):
    """One condition of an objective: `memory <= 92% of device`; `of` is the name after `of`, if any."""

    span: Span
    key: Name
    relation: str
    value: Expression
    of: Name | None


class Objective(NamedTuple):
    """`minimize step_time subject to memory <= 92% of device, ...` (or `maximize`)."""

    span: Span
    direction: str
    goal: Name
    limits: tuple[Limit, ...]


Statement = Import | Entry | Section | Objective


class SyntaxTree(NamedTuple):
    path: str
    source: str
    statements: tuple[Statement, ...] = ()
