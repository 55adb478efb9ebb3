"""Why each choice is as it is: who decided, and the number that did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from titan.compiler.cost.estimate import Estimate, Estimator
from titan.compiler.cost.shape import Shape
from titan.compiler.plan.sequence import needed_steps
from titan.compiler.search.candidates import Candidate, saved
from titan.compiler.search.ladder import Ladders
from titan.compiler.search.space import PREFERRED
from titan.compiler.spec.padding import padded, padding_in_words
from titan.compiler.strategy import Strategy

if TYPE_CHECKING:
    from titan.compiler.spec.schema import Spec

MESH = ("pipeline", "data", "context", "tensor")
CHOICES = (
    *MESH,
    "expert",
    "expert_tensor",
    "sequence_parallel",
    "context_form",
    "context_heads",
    "context_order",
    "loss_rows",
    "zero",
    "shard",
    "gather",
    "reduce",
    "prefetch",
    "schedule",
    "late_check",
    "recompute",
    "offload",
    "micro_batch",
    "stages",
)
OF_EXPERTS = ("expert", "expert_tensor")
LEAST_ZERO = {"shard": 1, "gather": 3, "reduce": 3, "prefetch": 3}  # ZeRO stages from which a choice has a meaning
LESS = "less, by estimate"
PADDING = "train.padding"  # the setting of the plan
Reason = tuple[str, str, str]


def reasons(
    spec: Spec, estimator: Estimator, chosen: Candidate, everything: Sequence[Candidate], limit: int
) -> tuple[Reason, ...]:
    """(field, origin, sentence) for every choice; origin is user, default or search. Times are closed forms.
    `everything` holds all candidates, best first, those that fit before the others."""
    found = tuple(
        _reason(spec, estimator, chosen, everything, limit, key)
        for key in CHOICES
        if spec.model.experts or key not in OF_EXPERTS
    )
    filled = padding_in_words(spec.train.sequence, chosen.strategy)
    return (*found, (PADDING, "default", filled)) if filled else found


def _reason(
    spec: Spec, estimator: Estimator, chosen: Candidate, everything: Sequence[Candidate], limit: int, key: str
) -> Reason:
    wish = getattr(spec.parallel, key)
    if wish.fixed:
        unused = (
            ", which has no order of one stage" if key == "schedule" and wish.value != chosen.strategy.schedule else ""
        )
        return key, "user", f"written: {key} {wish}{unused}"
    idle = _idle(chosen.strategy, key)
    if key == "offload" and not spec.cluster.host_bytes:
        idle = "the cluster states no host memory with its link"
    if idle:
        return key, "default", idle
    if key == "loss_rows":
        kept = "logits fit and are kept until backward"
        return key, "search", "logits would be large: formed in pieces, twice" if chosen.strategy.loss_rows else kept
    if key == "stages":
        return key, "search", _stages_sentence(chosen.strategy)
    within = "" if wish.relation == "auto" else f" (within {key} {wish})"
    best = _best_other(spec, estimator, chosen, everything, key, wish, limit)
    if best is None and key == "late_check":
        return key, "search", "a step ends where it began, on the same rank: not to wait for the norm saves nothing"
    if best is None:
        return key, "search", f"no other value is legal{within}"
    value, estimate = best
    if key == "context_order":
        within = _ring_steps(estimator.shape, chosen.strategy, str(value)) + within
    if key == "context_heads":
        within = _ring_place(spec.cluster.devices_per_node, chosen.strategy) + within
    return key, "search", f"{key} = {_text(value)} {_compare(estimate, chosen.estimate, limit)}{within}"


def as_simulated(strategy: Strategy, step: float, others: Sequence[tuple[Strategy, float]]) -> tuple[Reason, ...]:
    """The reasons of a strategy; where closed forms would have another value win, also what the best plan with another
    value took in simulation. `step`: simulated seconds of a step, `others` those of the other plans."""

    def completed(key: str, origin: str, text: str) -> Reason:
        mine = getattr(strategy, key, None)
        best = min((took for s, took in others if getattr(s, key, mine) != mine), default=0.0)
        if origin != "search" or LESS not in text or best < step:
            return key, origin, text
        return key, origin, f"{text}; simulated {best / step - 1:.1%} more: {seconds(best)} instead of {seconds(step)}"

    return tuple(completed(*reason) for reason in strategy.reasons)


def _ring_place(node: int, s: Strategy) -> str:
    """Over which links keys and values go around, and heads are exchanged; `node`: devices of one."""

    def place(ranks: int) -> str:
        return "inside a node" if ranks <= node else "across nodes"

    exchange = f", {s.context_heads} ranks exchange heads {place(s.tensor * s.context_heads)}"
    ring = f"; a ring of {s.context // s.context_heads} {place(s.tensor * s.context)}"
    return ring + (exchange if s.context_heads > 1 else "")


def _ring_steps(shape: Shape, s: Strategy, other: str) -> str:
    """How many steps of a ring a window leaves in the other order and in this one; empty without one."""
    window, ring = min((w for w, _ in shape.windows if w), default=0), s.context // s.context_heads
    if not window:
        return ""
    theirs, ours = (
        len(needed_steps(ring, o == "zigzag", padded(shape.sequence, replace(s, context_order=o)) // ring, window))
        for o in (other, s.context_order)
    )
    return f"; {theirs} steps of {ring} within {window} tokens, here {ours}"


def _idle(s: Strategy, key: str) -> str:
    """Why a choice changes nothing; empty when it does."""
    if key == "expert_tensor" and s.tensor == 1:
        return "tensor = 1"
    if key == "sequence_parallel" and s.tensor == 1:
        return "nothing to shard: tensor = 1"
    if key == "context_form" and s.context == 1:
        return "nothing to gather: context = 1"
    if key == "context_heads" and (s.context == 1 or s.context_form != "ring"):
        return "no ring whose places could exchange heads"
    if key == "context_order" and (s.context == s.context_heads or s.context_form != "ring"):
        return "no ring"
    if key == "zero" and s.data * s.context == 1 and not s.zero:
        return "nothing to shard: data x context = 1"
    if key == "prefetch" and s.offload != "none":
        return ""
    if key == "prefetch" and s.zero == 3 and s.gather == "once":
        return "gathered once: from the beginning of the step on"
    if key in LEAST_ZERO and (s.zero < LEAST_ZERO[key] or s.data * s.context == 1):
        return f"zero = {s.zero}: it changes nothing"
    if key in ("schedule", "stages", "late_check") and s.pipeline == 1:
        return "one stage"
    return ""


def _stages_sentence(s: Strategy) -> str:
    """The balance in words."""
    return f"{min(s.stages)} to {max(s.stages)} layers: the slowest stage, head counted, is as fast as can be"


def _best_other(
    spec: Spec,
    estimator: Estimator,
    chosen: Candidate,
    everything: Sequence[Candidate],
    key: str,
    wish: Any,
    limit: int,
) -> tuple[Any, Estimate] | None:
    """The first of `everything` (best first, those that fit before others) with another value of the choice."""
    mine = getattr(chosen.strategy, key)
    if key == "late_check":
        plain = replace(chosen.strategy, late_check=not mine, reasons=())
        return next(((not mine, c.estimate) for c in everything if replace(c.strategy, reasons=()) == plain), None)
    if key in LEAST_ZERO:
        return _other_sharding(spec, estimator, chosen.strategy, key, wish)
    if key == "schedule":
        other = next((c for c in everything if _differs_in_schedule(c.strategy, chosen.strategy)), None)
        if other is not None:
            return other.strategy.schedule, other.estimate
    if key in (
        "zero",
        "schedule",
        "recompute",
        "offload",
        "sequence_parallel",
        "context_order",
    ):  # not enumerated where one value is never better: change this one alone
        values = [v for v in PREFERRED[key] if v != mine and wish.allows(v)]
        change: dict[str, Any] = {key: values[0]} if values else {}
        if key == "schedule":  # which may have other chunks
            change |= {"stages": spec.parallel.stages.value or (), "wished_chunks": 0}
        return (values[0], estimator.estimate(replace(chosen.strategy, **change))) if values else None
    found = next((c for c in everything if getattr(c.strategy, key) != mine), None)
    if found is None:
        return None
    return getattr(found.strategy, key), saved(Ladders(spec), estimator, found, limit).estimate


def _differs_in_schedule(other: Strategy, chosen: Strategy) -> bool:
    """The same mesh and micro-batch under another schedule, its order timed as well."""
    same = all(getattr(other, key) == getattr(chosen, key) for key in (*MESH, "micro_batch"))
    return same and other.schedule != chosen.schedule and bool(other.stages)


def _other_sharding(spec: Spec, estimator: Estimator, s: Strategy, key: str, wish: Any) -> tuple[Any, Estimate] | None:
    """The other value of a choice that belongs to ZeRO, everything else as it is."""
    node = spec.cluster.devices_per_node // (s.context * s.tensor)
    degrees = (0, node) if 1 < node < s.data and s.data % node == 0 else (0,)
    values: tuple[Any, ...] = {"shard": degrees, "prefetch": (1, 0)}.get(key, ("once", "each"))
    for value in values:
        if value != getattr(s, key) and wish.allows(value):
            change: dict[str, Any] = {key: value}
            return value, estimator.estimate(replace(s, **change))
    return None


def _compare(other: Estimate, chosen: Estimate, limit: int) -> str:
    if other.memory > limit:
        return f"does not fit: {gib(other.memory)} of {gib(limit)}"
    change = other.seconds / chosen.seconds - 1
    if abs(change) < 5e-4:
        return f"takes as long ({seconds(other.seconds)}) and holds {gib(other.memory)} instead of {gib(chosen.memory)}"
    word = "more" if change > 0 else LESS
    return f"takes {abs(change):.1%} {word}: {seconds(other.seconds)} instead of {seconds(chosen.seconds)}"


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 0.1 else f"{value * 1e3:.3g} ms"


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
