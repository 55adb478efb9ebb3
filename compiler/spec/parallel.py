"""The `parallel` section to wishes; choices of later versions are refused, or dropped where others remain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titan.compiler.plan.frozen import dataclass
from titan.compiler.schedules.registry import SCHEDULES
from titan.compiler.spec.order_file import read_schedule
from titan.compiler.spec.report import Refusal, Report, similar
from titan.compiler.spec.synonyms import right_key
from titan.compiler.spec.values import Broken, Field, Items, Origins, Record, Scalar, Text, Value, Word, describe
from titan.compiler.spec.wishes import Parallel, Wish
from titan.grammar.diagnostics import Note, Span


@dataclass(frozen=True, slots=True)
class Choice:
    """What a key takes: "degree" (1, 2, ...), "level" (0, 1, ...), "flag", "word" or "stages"; the values of this
    version (empty: all), those of later ones with the reason, and words that mean `auto`, with the reason."""

    form: str
    now: tuple[Any, ...] = ()
    later: str | dict[Any, str] = ""
    as_auto: tuple[tuple[str, str], ...] = ()

    def reason(self, value: Any) -> str:
        """Why a value is not in this version; empty when it is no value at all."""
        return self.later.get(value, "") if isinstance(self.later, dict) else self.later

    def why_not(self, value: Any) -> str:
        """The same in words for every value."""
        return self.reason(value) or "it has no meaning"


CHOICES: dict[str, Choice] = {
    "region": Choice("degree", (1,), "training over several regions is not built yet"),
    "pipeline": Choice("degree"),
    "data": Choice("degree"),
    "context": Choice("degree"),
    "tensor": Choice("degree"),
    "expert": Choice("degree"),
    "expert_tensor": Choice("degree"),
    "sequence_parallel": Choice("flag", (True, False)),
    "context_form": Choice("word", ("gathered", "heads", "ring")),
    "context_heads": Choice("degree"),
    "context_order": Choice("word", ("zigzag", "contiguous")),
    "loss_rows": Choice("level"),
    "zero": Choice("level", (0, 1, 2, 3)),
    "shard": Choice("degree"),
    "gather": Choice("word", ("each", "once")),
    "reduce": Choice("word", ("each", "once")),
    "prefetch": Choice("level"),
    "schedule": Choice("word", tuple(SCHEDULES)),
    "chunks": Choice("degree"),
    "recompute": Choice("word", ("none", "selective", "full", "adaptive")),
    "offload": Choice("word", ("none", "optimizer", "activations", "both")),
    "micro_batch": Choice("degree"),
    "late_check": Choice("flag", (True, False)),
    "stages": Choice("stages"),
}
_OTHER_WORDS = {
    "1f1b": ("one_f_one_b",),
    "pipedream_flush": ("one_f_one_b",),
    "vpp": ("interleaved",),
    "looped_bfs": ("interleaved",),
    "zb_h1": ("zero_bubble_h1",),
    "zb1p": ("zero_bubble_h1",),
    "zb_h2": ("zero_bubble_h2",),
    "zb2p": ("zero_bubble_h2",),
    "zb_v": ("zero_bubble_v",),
    "zbv": ("zero_bubble_v",),
    "zero_bubble": ("zero_bubble_h1", "zero_bubble_v"),
    "dual_pipe": ("dualpipe",),
    "dualpipev": ("dualpipe_v",),
    "dual_pipe_v": ("dualpipe_v",),
}  # what other tools call the schedules


def read_parallel(
    value: Value | None, report: Report, origins: Origins, homes: Mapping[str, str] | None = None
) -> Parallel:
    """The wishes of a section; what cannot be read is reported and left at `auto`. `homes`: keys of other sections."""
    if value is None or isinstance(value, Broken):
        return Parallel()
    if not isinstance(value, Record) or value.kind not in ("", "parallel"):
        report.error("T214", f"`parallel` must be a section, not {describe(value)}", value.span)
        return Parallel()
    wishes: dict[str, Wish] = {}
    for key, written in value.fields.items():
        origins.keys[f"parallel.{key}"], origins.values[f"parallel.{key}"] = written.key, written.value.span
        try:
            if isinstance(written.value, Broken):
                continue
            if key not in CHOICES:
                raise _unknown(key, written.key, homes or {})
            wishes[key] = _wish(key, CHOICES[key], written, report)
        except Refusal as refusal:
            report.add(refusal.diagnostic)
    return Parallel(**wishes)


def _wish(key: str, choice: Choice, written: Field, report: Report) -> Wish:
    relation, value = written.relation, written.value
    if isinstance(value, Word) and value.name == "auto":
        if relation != "=":
            raise Refusal("T223", f"write `{key} = auto`", written.key)
        return Wish("auto", (), value.span)
    for word, reason in choice.as_auto:
        if isinstance(value, Word) and value.name == word:
            report.warn("T225", f"`{key} = {word}` is read as auto in this version: {reason}", value.span)
            return Wish("auto", (), value.span)
    _check_relation(key, choice, written)
    if relation == "in":
        return _listed(key, choice, value, report)
    read = _read(key, choice, value)
    _check_available(key, choice, relation, read, value, report)
    return Wish(relation, (read,), value.span)


def _check_relation(key: str, choice: Choice, written: Field) -> None:
    allowed = {"degree": ("=", "<=", ">=", "in"), "level": ("=", "<=", ">=", "in"), "stages": ("=",)}
    relations = allowed.get(choice.form, ("=", "in"))
    if written.relation not in relations:
        near = tuple(f"{key} {relation} ..." for relation in relations)
        raise Refusal("T223", f"`{key}` has no order, so `{written.relation}` has no meaning", written.key, near)


def _listed(key: str, choice: Choice, value: Value, report: Report) -> Wish:
    """`in [...]`: later values are dropped with a warning while others remain."""
    if not isinstance(value, Items) or not value.items:
        raise Refusal("T214", f"`{key} in` needs a list such as [1, 2, 4]", value.span)
    kept: list[Any] = []
    dropped: list[tuple[Any, Value]] = []
    for item in value.items:
        read = _read(key, choice, item)
        if choice.now and read not in choice.now and not isinstance(item, Text):
            dropped.append((read, item))
        elif read not in kept:
            kept.append(read)
    if not kept:
        raise _unavailable(key, choice, dropped[0][0], value.span)
    for read, item in dropped:
        report.warn("T225", f"`{read}` is left out of `{key}`: {choice.why_not(read)}", item.span)
    return Wish("in", tuple(kept), value.span)


def _check_available(key: str, choice: Choice, relation: str, read: Any, value: Value, report: Report) -> None:
    if not choice.now or isinstance(value, Text):
        return
    if relation == "=" and read not in choice.now:
        raise _unavailable(key, choice, read, value.span)
    if relation == ">=" and read > max(choice.now):
        raise _unavailable(key, choice, read, value.span)
    if relation == "<=" and read > max(choice.now):
        top = max(choice.now)
        report.warn(
            "T225", f"`{key} <= {read}` means {key} <= {top} in this version: {choice.why_not(read)}", value.span
        )


def _read(key: str, choice: Choice, value: Value) -> Any:
    """One value in the form of the key."""
    if choice.form in ("degree", "level"):
        return _whole(key, value, 1 if choice.form == "degree" else 0)
    if choice.form == "stages":
        if not isinstance(value, Items) or not value.items:
            raise Refusal("T214", "`stages` is a list of the layers of each chunk, such as [8, 8, 7, 7]", value.span)
        return tuple(_whole("stages", item, 0) for item in value.items)
    if choice.form == "flag":
        if isinstance(value, Word) and value.name in ("true", "false"):
            return value.name == "true"
        raise Refusal("T214", f"`{key}` must be true, false or auto, not {describe(value)}", value.span)
    if key == "schedule" and isinstance(value, Text):
        return read_schedule(value)
    if not isinstance(value, Word):
        raise Refusal("T214", f"`{key}` must be a name, not {describe(value)}", value.span, choice.now)
    if value.name not in choice.now and not choice.reason(value.name):
        near = _OTHER_WORDS.get(value.name) or similar(value.name, choice.now) or choice.now
        raise Refusal("T217", f"`{key}` cannot be `{value.name}`", value.span, near)
    return value.name


def _whole(key: str, value: Value, least: int) -> int:
    if not isinstance(value, Scalar) or value.dimension or value.value != int(value.value):
        raise Refusal("T214", f"`{key}` must be a whole number, not {describe(value)}", value.span)
    if value.value < least:
        cure = "use 1 to disable" if least else "it counts from 0"
        raise Refusal("T241", f"`{key} = {value.text}` is not possible: {cure}", value.span, (str(least),))
    if value.value >= 2**31:
        raise Refusal("T216", f"`{key}` must be less than {2**31}, not {value.text}", value.span)
    return int(value.value)


def _unavailable(key: str, choice: Choice, read: Any, span: Span) -> Refusal:
    offered = ", ".join(str(v) for v in choice.now)
    message = f"`{key} = {read}` is not available in this version: {choice.why_not(read)}"
    return Refusal("T224", f"{message}; available: {offered}", span, tuple(str(v) for v in choice.now))


def _unknown(key: str, span: Span, homes: Mapping[str, str]) -> Refusal:
    near = right_key(key, CHOICES, homes)
    note = (Note(f"`parallel` has the keys {', '.join(CHOICES)}"),)
    return Refusal("T211", f"`{key}` is no key of `parallel`", span, near, note)
