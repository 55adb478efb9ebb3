"""Why another choice was not taken: the best plan that has it, or the rule that forbids it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from titan.compiler.plan.frozen import dataclass
from titan.compiler.search.goal import best
from titan.compiler.search.search import SearchResult
from titan.grammar.diagnostics import Diagnostic, TitanError

if TYPE_CHECKING:
    from titan.compiler.spec.schema import Spec

WORDS = {"true": True, "false": False}


@dataclass(frozen=True)
class WhyNot:
    """`result` is the best plan with the other choices, None when there is none; then `error` says which rule or which
    memory stands against it. `lifted` are the user's own wishes that had to be set aside."""

    asked: tuple[tuple[str, Any], ...]
    result: SearchResult | None
    error: TitanError | None
    lifted: tuple[str, ...]


def parse_question(question: str) -> tuple[tuple[str, Any], ...]:
    """`tensor=8, recompute=full` as pairs. Raises TitanError T304."""
    from titan.compiler.spec.parallel import CHOICES

    pairs: list[tuple[str, Any]] = []
    for part in question.replace(",", " ").split():
        key, mark, text = part.partition("=")
        if not mark or not text or key not in CHOICES or key == "stages":
            near = tuple(f"{name}=..." for name in CHOICES if name != "stages")
            raise TitanError(Diagnostic("T304", f"`{part}` is no choice of the `parallel` section", nearest=near))
        pairs.append((key, _value(key, text, CHOICES[key].form)))
    if not pairs:
        raise TitanError(Diagnostic("T304", "no choice is named", nearest=("tensor=8", "recompute=full")))
    return tuple(pairs)


def _value(key: str, text: str, form: str) -> Any:
    if form in ("degree", "level"):
        if not text.isdigit() or (form == "degree" and int(text) < 1) or len(text) > 9:
            raise TitanError(Diagnostic("T304", f"`{key}` takes a whole number, not `{text}`", nearest=(f"{key}=1",)))
        return int(text)
    if form == "flag":
        if text not in WORDS:
            raise TitanError(Diagnostic("T304", f"`{key}` takes true or false, not `{text}`"))
        return WORDS[text]
    return text


def why_not(spec: Spec, question: str) -> WhyNot:
    """The best plan under the spec's wishes with the asked choices pinned instead of what the user wrote for them."""
    from titan.compiler.spec.legality import check_pins
    from titan.compiler.spec.parallel import CHOICES
    from titan.compiler.spec.wishes import Wish

    asked = parse_question(question)
    for key, value in asked:
        now = CHOICES[key].now
        if now and value not in now:
            reason = CHOICES[key].why_not(value)
            message = f"`{key} = {value}` is not available in this version: {reason}"
            return WhyNot(asked, None, TitanError(Diagnostic("T224", message, nearest=tuple(map(str, now)))), ())
    wishes = {key: Wish("=", (value,)) for key, value in asked}
    lifted = tuple(
        f"{key} {getattr(spec.parallel, key)}" for key, value in asked if not getattr(spec.parallel, key).allows(value)
    )
    changed = replace(spec, parallel=replace(spec.parallel, **wishes))
    errors = [d for d in check_pins(changed) if d.severity == "error"]
    if errors:
        return WhyNot(asked, None, TitanError(errors), lifted)
    try:
        return WhyNot(asked, best(changed).result, None, lifted)
    except TitanError as error:
        return WhyNot(asked, None, error, lifted)
