"""`titan explain`: each choice with its origin and the number that decided, and why another choice was not taken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from titan.compiler.report.budget import budget_lines
from titan.compiler.report.summary import one_line

if TYPE_CHECKING:
    from titan.compiler.plan.program import Plan
    from titan.compiler.search.search import SearchResult
    from titan.compiler.spec.schema import Spec

DEGREES = ("pipeline", "data", "context", "tensor", "micro_batch")
WORDS = (
    "sequence_parallel",
    "context_form",
    "context_heads",
    "context_order",
    "zero",
    "shard",
    "gather",
    "reduce",
    "schedule",
    "recompute",
    "offload",
)
ORIGINS = {"user": "you", "default": "default", "search": "search"}


def explain_lines(plan: Plan, result: SearchResult | None = None) -> Iterator[str]:
    """Every choice of the plan; with the search's result also what it was chosen against."""
    strategy = plan.setting("strategy") or {}
    yield f"{'choice':<18} {'value':<14} {'by':<8} why"
    for key, origin, sentence in strategy.get("reasons", ()):
        value = _value(strategy.get(key, plan.setting(key)))
        yield f"{key:<18} {value:<14} {ORIGINS.get(origin, origin):<8} {sentence}"
    yield ""
    yield from budget_lines(plan)
    if result is None:
        return
    yield ""
    yield f"chosen     {result.timeline.seconds:.4g} s, {_gib(result.ledger.peak)}: {one_line(result.strategy)}"
    for runner in result.runners_up:
        change = runner.seconds / result.timeline.seconds - 1
        why = f"{change:+.1%}" if change > 0 else f"{change:+.1%}, memory {runner.verdict}"
        yield f"runner-up  {runner.seconds:.4g} s ({why}), {_gib(runner.memory)}: {one_line(runner.strategy)}"
    yield f"{result.candidates:,} legal strategies, {result.fitting:,} of {result.priced:,} priced fit the memory"
    yield from result.notes


def explain_why_not(spec: Spec, result: SearchResult, question: str) -> Iterator[str]:
    """Why `tensor=8` was not taken. Raises TitanError T304 when the question names no choice."""
    from titan.compiler.search.why_not import why_not

    found = why_not(spec, question)
    asked = ", ".join(f"{key} = {_value(value)}" for key, value in found.asked)
    for wish in found.lifted:
        yield f"your own wish stands against it: {wish}"
    if found.error is not None:
        yield f"{asked} is not possible:"
        for diagnostic in found.error.diagnostics:
            yield f"  {diagnostic.code}: {diagnostic.message}"
            yield from (f"    {note.text}" for note in diagnostic.notes)
            if diagnostic.nearest:
                yield f"    nearest: {', '.join(diagnostic.nearest)}"
        return
    assert found.result is not None
    yield from _compare(asked, result, found.result)


def _compare(asked: str, chosen: SearchResult, other: SearchResult) -> Iterator[str]:
    if all(getattr(chosen.strategy, key) == getattr(other.strategy, key) for key in (*DEGREES, *WORDS)):
        yield f"{asked}: that is what was chosen"
        return
    change = other.timeline.seconds / chosen.timeline.seconds - 1
    verdict = "slower" if change > 0 else "faster" if change < 0 else "as fast"
    yield f"the best plan with {asked} is {abs(change):.1%} {verdict}: {other.timeline.seconds:.4g} s"
    yield f"  it is    {one_line(other.strategy)}"
    yield f"  chosen   {one_line(chosen.strategy)}, {chosen.timeline.seconds:.4g} s"
    for name, mine, theirs in _shares(chosen, other):
        yield f"  {name:<22} {mine} -> {theirs}"


def _shares(chosen: SearchResult, other: SearchResult) -> Iterator[tuple[str, str, str]]:
    for name in ("busy_fraction", "bubble_fraction", "exposed_comm_fraction"):
        mine, theirs = getattr(chosen.timeline, name), getattr(other.timeline, name)
        seconds = mine * chosen.timeline.seconds, theirs * other.timeline.seconds
        yield name.removesuffix("_fraction").replace("_", " "), f"{seconds[0]:.4g} s", f"{seconds[1]:.4g} s"
    yield "peak memory", _gib(chosen.ledger.peak), _gib(other.ledger.peak)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        listed = ",".join(map(str, value))
        return listed if len(listed) <= 14 else f"{len(value)} stages"
    return str(value)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
