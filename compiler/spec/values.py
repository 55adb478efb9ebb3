"""Evaluated values: what an expression of a `.titan` file stands for, names, arithmetic and overrides worked out."""

from __future__ import annotations

from dataclasses import field

from titan.compiler.plan.frozen import dataclass
from titan.grammar.diagnostics import Span


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number in base units (bytes, bytes/s, FLOP/s, seconds, tokens, fraction) with the kind of its unit."""

    value: int | float
    dimension: str
    text: str
    span: Span


@dataclass(frozen=True, slots=True)
class Word:
    """A bare name that is no definition: `auto`, `bf16`, `true`."""

    name: str
    span: Span


@dataclass(frozen=True, slots=True)
class Text:
    value: str
    span: Span


@dataclass(frozen=True, slots=True)
class Items:
    items: tuple[Value, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Applied:
    """`tokens("corpus.bin")`, `measured(0.7, "source")`."""

    name: str
    arguments: tuple[Value, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Broken:
    """A value whose error is already reported; whatever depends on it stays silent."""

    span: Span


@dataclass(frozen=True, slots=True)
class Field:
    key: Span
    relation: str
    value: Value


@dataclass(frozen=True, slots=True)
class Record:
    """`kind { key = value ... }`; `name` is the definition it came from, `fields` is never changed after it is made."""

    kind: str
    fields: dict[str, Field]
    span: Span
    name: str = ""


@dataclass(frozen=True, slots=True)
class Layers:
    """`3 * dense { ... } + 58 * moe { ... }`: counts and blocks in order."""

    groups: tuple[tuple[Scalar, Record], ...]
    span: Span


Value = Scalar | Word | Text | Items | Applied | Broken | Record | Layers


@dataclass(slots=True)
class Origins:
    """Where each path of the spec was written: the key and the value."""

    keys: dict[str, Span] = field(default_factory=dict)
    values: dict[str, Span] = field(default_factory=dict)

    def value(self, path: str) -> Span | None:
        """The span of `path`, else of the nearest enclosing path that was written."""
        while path:
            if path in self.values:
                return self.values[path]
            path = path.rpartition(".")[0]
        return None

    def key(self, path: str) -> Span | None:
        return self.keys.get(path) or self.value(path)


def describe(value: object) -> str:
    """The value as a user would write it, for messages."""
    if isinstance(value, Scalar):
        return value.text
    if isinstance(value, Word):
        return value.name
    if isinstance(value, Text):
        return f'"{value.value}"'
    if isinstance(value, Record):
        return f"a block `{value.kind} {{ ... }}`" if value.kind else "a block"
    if isinstance(value, Applied):
        return f"{value.name}(...)"
    if isinstance(value, Items):
        return f"a list of {len(value.items)}"
    return "a sum of layers" if isinstance(value, Layers) else str(value)
