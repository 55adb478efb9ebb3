"""Syntax nodes: what was written in a `.titan` file, nothing resolved. Every node carries its `Span`."""

from __future__ import annotations

from dataclasses import dataclass, field

from titan.grammar.diagnostics import Span


@dataclass(frozen=True, slots=True)
class Quantity:
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


@dataclass(frozen=True, slots=True)
class String:
    span: Span
    value: str


@dataclass(frozen=True, slots=True)
class Name:
    """A dotted name: `llama.llama3_70b`, `auto`, `bf16`, `true`."""

    span: Span
    parts: tuple[str, ...]

    @property
    def dotted(self) -> str:
        return ".".join(self.parts)


@dataclass(frozen=True, slots=True)
class ListOf:
    span: Span
    items: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """`tokens("corpus.bin")`: a name applied to positional arguments."""

    span: Span
    name: Name
    arguments: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """`adamw { learning_rate = 3e-4 }`; a bare `{ ... }` has an empty name."""

    span: Span
    name: Name | None
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class With:
    """`base with { nodes = 128 }`."""

    span: Span
    base: Expression
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Binary:
    """`left operator right` with operator one of + - * /."""

    span: Span
    operator: str
    left: Expression
    right: Expression


Expression = Quantity | String | Name | ListOf | Call | Block | With | Binary


@dataclass(frozen=True, slots=True)
class Entry:
    """`key relation value` inside a block or at the top level; relation is one of `=`, `<=`, `>=`, `in`."""

    span: Span
    key: Name
    relation: str
    value: Expression


@dataclass(frozen=True, slots=True)
class Import:
    span: Span
    name: Name


@dataclass(frozen=True, slots=True)
class Section:
    """A top-level named block: `train { ... }`, `parallel { ... }`."""

    span: Span
    name: Name
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Limit:
    """One condition of an objective: `memory <= 92% of device`; `of` is the name after `of`, if any."""

    span: Span
    key: Name
    relation: str
    value: Expression
    of: Name | None


@dataclass(frozen=True, slots=True)
class Objective:
    """`minimize step_time subject to memory <= 92% of device, ...` (or `maximize`)."""

    span: Span
    direction: str
    goal: Name
    limits: tuple[Limit, ...]


Statement = Import | Entry | Section | Objective


@dataclass(frozen=True, slots=True)
class SyntaxTree:
    path: str
    source: str
    statements: tuple[Statement, ...] = field(default=())
