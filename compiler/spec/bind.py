"""Written blocks to parts of the spec: pydantic checks them, each finding becomes a diagnostic at its place."""

from __future__ import annotations

from dataclasses import field
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from titan.compiler.plan.frozen import dataclass
from titan.compiler.spec.kinds import KIND, LATER, NAME, Part
from titan.compiler.spec.report import Refusal, Report, similar
from titan.compiler.spec.synonyms import right_key
from titan.compiler.spec.values import (
    Broken,
    Field,
    Items,
    Layers,
    Origins,
    Record,
    Text,
    Value,
    Word,
    describe,
)
from titan.grammar.diagnostics import Note

P = TypeVar("P", bound=Part)
MAX_PATHS = 50_000  # names that refer to names can multiply without end

# keys that follow from others: their absence is not worth a word when those are already wrong
_DERIVED = {"attention.head_dim": ("hidden", "attention.heads"), "attention.kv_heads": ("attention.heads",)}
_TAGS = ("[key]", "dense", "moe", "gqa", "mla")  # in pydantic's places: which of several blocks stands there
_RANGES = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}
_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "string": "a name or a text",
    "bool": "true or false",
    "model": "a block { ... }",
    "dict": "a block { ... }",
    "tuple": "layers, `32 * dense { ... }`",
}


@dataclass(slots=True)
class Binder:
    """Binds blocks to parts; keeps where every path was written in `origins`."""

    report: Report
    origins: Origins = field(default_factory=Origins)
    texts: dict[str, str] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    kinds: dict[str, str] = field(default_factory=dict)
    room: int = MAX_PATHS
    homes: dict[str, str] = field(default_factory=dict)  # where a key that is met elsewhere belongs

    def bind(self, part: type[P], value: Value | None, path: str, extra: dict[str, int] | None = None) -> P | None:
        """The part, or None with the errors in the report; `extra` are keys that nobody wrote."""
        if value is None:
            return None
        try:
            data = self.plain(value, path)
        except Refusal as refusal:
            self.report.add(refusal.diagnostic)
            return None
        if isinstance(value, Broken):
            return None
        if extra and isinstance(data, dict):
            data = data | extra
        try:
            bound = part.model_validate(data)
        except ValidationError as error:
            self._translate(part, path, error)
            return None
        return None if any(b.startswith(path) for b in self.broken) else bound

    def plain(self, value: Value, path: str) -> Any:
        """The value as dicts, lists and scalars for pydantic; records where each path was written."""
        self.room -= 1
        if self.room < 0:
            raise Refusal("T236", f"more than {MAX_PATHS} values when written out", self.origins.value(path))
        self.origins.values[path] = value.span
        self.texts[path] = describe(value)
        match value:
            case Record(kind, fields, _, name):
                entries = {key: self._entry(written, f"{path}.{key}") for key, written in fields.items()}
                self.kinds[path] = kind
                return {KIND: kind, NAME: name} | entries
            case Layers(groups):
                pairs = enumerate(groups)
                return [
                    {"count": self.plain(n, f"{path}.{i}.count"), "block": self.plain(b, f"{path}.{i}.block")}
                    for i, (n, b) in pairs
                ]
            case Items(items):
                return [self.plain(item, f"{path}.{i}") for i, item in enumerate(items)]
            case Word(name):
                return {"true": True, "false": False}.get(name, name)
            case Text(text):
                return text
            case Broken():
                self.broken.add(path)
        return value

    def _entry(self, written: Field, path: str) -> Any:
        self.origins.keys[path] = written.key
        if written.relation != "=":
            key = path.rpartition(".")[2]
            self.report.error(
                "T223", f"`{key} {written.relation} ...` is a wish, but `{key}` must be given: write =", written.key
            )
            self.broken.add(path)
        return self.plain(written.value, path)

    # pydantic's findings in our words

    def _translate(self, part: type[Part], path: str, error: ValidationError) -> None:
        findings = {".".join(str(p) for p in f["loc"] if p not in _TAGS): f for f in error.errors(include_url=False)}
        broken = {b.removeprefix(f"{path}.") for b in self.broken}
        for place, finding in findings.items():
            full = f"{path}.{place}" if place else path
            if not _follows(place, finding["type"], set(findings), broken) and not self._misspelt(
                part, path, place, findings
            ):
                self._tell(part, full, finding)

    def _misspelt(self, part: type[Part], path: str, place: str, findings: dict[str, Any]) -> bool:
        """Is the key missing because it stands there under a wrong name, which is reported?"""
        if findings[place]["type"] != "missing":
            return False
        block, _, key = place.rpartition(".")
        others = [p for p, f in findings.items() if f["type"] == "extra_forbidden" and p.rpartition(".")[0] == block]
        known = _keys(_part_at(part, block.split(".") if block else [], self.kinds.get(f"{path}.{block}", "")))
        return any(key in right_key(other.rpartition(".")[2], known, self.homes) for other in others)

    def _tell(self, part: type[Part], path: str, finding: Any) -> None:
        kind, context, key = finding["type"], finding.get("ctx", {}), path.rpartition(".")[2]
        span, text = self.origins.value(path), self.texts.get(path, "")
        if kind.startswith("T") and kind[1:].isdigit():
            at = _beside(path, context["at"])
            self.report.error(kind, context["message"], self.origins.value(at), tuple(context["nearest"]))
        elif kind == "missing":
            self._missing(path, key)
        elif kind == "extra_forbidden":
            self._extra(part, path, key)
        elif kind in _RANGES:
            words, bound = _RANGES[kind]
            self.report.error("T216", f"`{key}` must be {words} {context[bound]}, not {text}", span)
        elif kind == "too_short":
            self.report.error("T214", f"`{key}` must have at least one entry, not {text}", span)
        elif kind == "literal_error":
            self._choice(part, path, key, text)
        else:
            expected = _EXPECTED.get(kind.partition("_")[0], finding["msg"])
            self.report.error("T214", f"`{key}` must be {expected}, not {text or finding['input']}", span)

    def _missing(self, path: str, key: str) -> None:
        block = path.rpartition(".")[0]
        self.report.error("T212", f"`{key}` is missing in `{block}`", self.origins.value(block), (f"{key} = ...",))

    def _extra(self, part: type[Part], path: str, key: str) -> None:
        block = path.rpartition(".")[0]
        owner = _part_at(part, path.split(".")[1:-1], self.kinds.get(block, ""))
        known = _keys(owner)
        notes = (Note(f"`{block}` has the keys {', '.join(known)}"),) if known else ()
        near = right_key(key, known, self.homes)
        self.report.error("T211", f"`{key}` is no key of `{block}`", self.origins.key(path), near, notes)

    def _choice(self, part: type[Part], path: str, key: str, text: str) -> None:
        owner = _part_at(part, path.split(".")[1:-1], self.kinds.get(path.rpartition(".")[0], ""))
        choices = _choices(owner, key)
        span = self.origins.value(path)
        word = text.strip('"')
        if word in LATER:
            message = f"`{key} = {word}` is not available in this version: {LATER[word]}"
            self.report.error("T224", message, span, choices)
        else:
            near = similar(word, choices) or choices
            note = (Note(f"`{key}` may be {', '.join(choices)}"),) if choices else ()
            self.report.error("T217", f"`{key}` cannot be {text}", span, near, note)


def _follows(place: str, kind: str, found: set[str], broken: set[str]) -> bool:
    """Is the finding only a consequence of another one, or of something already reported?"""
    if any(place == other or place.startswith(f"{other}.") for other in broken):
        return True
    if kind == "missing":
        return any(cause in found | broken for cause in _DERIVED.get(place, ()))
    return kind == "too_short" and any(other.startswith(f"{place}.") for other in found)


def _keys(part: type[Part] | None) -> list[str]:
    return list(part.model_fields) if part else []


def _beside(path: str, at: str) -> str:
    """`key` is below the path, `^key` in the same block."""
    if at.startswith("^"):
        return f"{path.rpartition('.')[0]}.{at[1:]}"
    return f"{path}.{at}" if at else path


def _part_at(part: type[Part], keys: list[str], kind: str = "") -> type[Part] | None:
    """The class of the block at a path below `part`; where several may stand there, the one written as `kind`."""
    current: type[Part] | None = part
    for number, key in enumerate(keys):
        if current is None or key.isdigit():
            continue
        info = current.model_fields.get(key)
        classes = _inner(info.annotation) if info else []
        last = all(k.isdigit() for k in keys[number + 1 :])
        current = next((c for c in classes if last and kind in c.KINDS), classes[0] if classes else None)
    return current


def _inner(annotation: Any) -> list[type[Part]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation] if issubclass(annotation, Part) else []
    return [found for a in get_args(annotation) for found in _inner(a)]


def _choices(owner: type[Part] | None, key: str) -> tuple[str, ...]:
    if owner is None:
        return ()
    if key in owner.model_fields:
        return tuple(str(a) for a in get_args(owner.model_fields[key].annotation))
    # a key of a table, such as `peak`
    return tuple(
        str(a) for info in owner.model_fields.values() for a in get_args((get_args(info.annotation) or ("",))[0])
    )
