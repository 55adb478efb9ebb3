"""What the user's fixed wishes alone already decide, before any search."""

from __future__ import annotations

from math import prod
from typing import Any

from titan.compiler.schedules.registry import schedule_row
from titan.compiler.spec.advice import advice
from titan.compiler.spec.breach import Breach
from titan.compiler.spec.degrees import AXES
from titan.compiler.spec.devices import parts
from titan.compiler.spec.divisors import around, divisors, factorisation, multiples
from titan.compiler.spec.legality import Rule, diagnostic, rules_about
from titan.compiler.spec.padding import padding_in_words, sequence_unit
from titan.compiler.spec.report import in_order
from titan.compiler.spec.schema import Spec
from titan.grammar.diagnostics import Diagnostic

_WORLD = Rule("T240", "the degrees multiply to the world size", AXES, lambda spec, choices: None)


class Pins:
    """The fixed choices as attributes, as the rules read them."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)


def check_pins(spec: Spec) -> tuple[Diagnostic, ...]:
    """Errors and warnings that follow from the spec before any search, in the order of their places. Where devices may
    stay idle, what the largest part of the cluster says on which the wishes are possible."""
    first: tuple[Diagnostic, ...] | None = None
    for part in parts(spec):
        found = _check_pins(part)
        if not any(d.severity == "error" for d in found):
            return found
        first = first or found
    return first or ()


def _check_pins(spec: Spec) -> tuple[Diagnostic, ...]:
    pins = pinned(spec)
    found = _broken_rules(spec, pins) + _shared_world(spec, pins) + _impossible_wishes(spec, pins)
    return tuple(in_order((*found, *_idle_choices(spec, pins), *advice(spec, pins))))


def pinned(spec: Spec) -> dict[str, Any]:
    """Fixed choices, and those that follow: the pipeline from listed stages, the last free axis from the world size."""
    pins: dict[str, Any] = {key: wish.value for key, wish in spec.parallel.items() if wish.fixed} | {"region": 1}
    _follow_stages(spec, pins)
    free = [axis for axis in AXES if axis not in pins]
    if len(free) == 1:
        product = prod(pins[axis] for axis in AXES if axis in pins)
        degree, rest = divmod(spec.cluster.world_size, product)
        if not rest and getattr(spec.parallel, free[0]).allows(degree):
            pins[free[0]] = degree
    elif prod(pins[axis] for axis in AXES if axis in pins) == spec.cluster.world_size:
        pins |= {axis: 1 for axis in free if getattr(spec.parallel, axis).allows(1)}
    return pins


def _follow_stages(spec: Spec, pins: dict[str, Any]) -> None:
    """Listed stages, the schedule and the pipeline degree say how many chunks a rank holds, or the degree."""
    listed = len(pins.get("stages", ()))
    row = schedule_row(pins["schedule"]) if "schedule" in pins else None
    if row is not None and row.size is not None and spec.parallel.pipeline.allows(row.size[0]):
        pins.setdefault("pipeline", row.size[0])
    if "chunks" not in pins and row is not None and not (row.most_chunks and listed):
        pins["chunks"] = row.chunks
    if not listed:
        return
    if "pipeline" not in pins:
        number, rest = divmod(listed, pins.setdefault("chunks", 1))
        if not rest and spec.parallel.pipeline.allows(number):
            pins["pipeline"] = number
    elif "chunks" not in pins:
        number, rest = divmod(listed, pins["pipeline"])
        pins["chunks"] = 1 if rest else max(number, 1)


def _broken_rules(spec: Spec, pins: dict[str, Any]) -> list[Diagnostic]:
    """Every decidable rule; of several rules with one code the first that is broken speaks."""
    found: dict[str, Diagnostic] = {}
    choices: Any = Pins(pins)
    for rule in rules_about(set(pins)):
        breach = None if rule.code in found else rule.breach(spec, choices)
        if breach is not None:
            found[rule.code] = diagnostic(spec, rule, breach)
    return list(found.values())


def _shared_world(spec: Spec, pins: dict[str, Any]) -> list[Diagnostic]:
    """Some axes are free: the product of the others must still divide the world size."""
    degrees = {axis: pins[axis] for axis in AXES if axis in pins}
    product, world = prod(degrees.values()), spec.cluster.world_size
    if len(degrees) == len(AXES) or world % product == 0:
        return []
    size = f"{spec.cluster.nodes} nodes x {spec.cluster.devices_per_node} devices"
    message = f"{factorisation(degrees)} = {product} does not divide the {world} devices of the cluster ({size})"
    last = next(reversed(degrees))
    ok = tuple(d for d in divisors(world) if world % (product // degrees[last] * d) == 0)
    near = tuple(f"{last} = {d}" for d in around(ok, degrees[last]))
    return [diagnostic(spec, _WORLD, Breach(message, last, near, ((size, "cluster.nodes"),)))]


def _impossible_wishes(spec: Spec, pins: dict[str, Any]) -> list[Diagnostic]:
    """Wishes that leave a choice of degrees, none of which is legal."""
    found: list[Diagnostic] = []
    world = spec.cluster.world_size
    for axis in AXES:
        wish = getattr(spec.parallel, axis)
        if wish.relation == "auto" or wish.fixed:
            continue
        degrees = [d for d in divisors(world) if wish.allows(d)]
        if not degrees:
            message = f"no degree with {axis} {wish} divides the {world} devices of the cluster"
            near = around(divisors(world), min(int(v) for v in wish.values))
            found.append(diagnostic(spec, _WORLD, Breach(message, axis, near)))
            continue
        broken = [_first_breach(spec, axis, degree) for degree in degrees]
        if all(broken):
            rule, breach = next(b for b in broken if b)
            message = f"no degree with {axis} {wish} is possible: {breach.message}"
            found.append(diagnostic(spec, rule, Breach(message, axis, breach.nearest, breach.facts)))
    return found


def _first_breach(spec: Spec, axis: str, degree: int) -> tuple[Rule, Breach] | None:
    choices: Any = Pins({axis: degree})
    for rule in rules_about({axis}):
        breach = rule.breach(spec, choices) if rule.needs else None
        if breach is not None:
            return rule, breach
    return None


def _copied(spec: Spec, pins: dict[str, Any]) -> bool:
    """Whether stages hold copies of the same weights, over which optimizer state is sharded on one data rank too."""
    copies = schedule_row(pins["schedule"]).copies if "schedule" in pins else 1
    return bool(pins.get("pipeline", 1) > 1 and (copies > 1 or spec.model.tied))


def _filled_up(spec: Spec, pins: dict[str, Any]) -> list[Diagnostic]:
    """A sequence that the fixed choices do not divide; what is free is taken as it asks least."""
    if "context" not in pins or spec.model.experts:
        return []  # experts are not sent padding: such sequences are refused
    least = {"tensor": 1, "sequence_parallel": False, "context_form": "gathered", "context_heads": 1}
    choices: Any = Pins({"context_order": "contiguous", **least, **pins})
    message = padding_in_words(spec.train.sequence, choices)
    near = tuple(f"sequence = {m}" for m in multiples(spec.train.sequence, sequence_unit(choices)))
    span = spec.span("train.sequence")
    legal = message and spec.train.sequence >= sequence_unit(choices)
    return [Diagnostic("T310", message, span, severity="warning", nearest=near)] if legal else []


def _idle_choices(spec: Spec, pins: dict[str, Any]) -> list[Diagnostic]:
    """Choices that are legal and change nothing."""
    if _copied(spec, pins):
        pins = {key: value for key, value in pins.items() if key != "zero"}
    found: list[Diagnostic] = []
    if pins.get("zero", 0) > 0 and pins.get("data", 0) * pins.get("context", 0) == 1:
        message = f"zero = {pins['zero']} shards over data x context (dp), which is 1 here, so it changes nothing"
        found.append(Diagnostic("T251", message, spec.span("parallel.zero"), severity="warning"))
    for key, least in (("shard", 1), ("reduce", 2), ("gather", 3), ("prefetch", 3)):
        of_host = key == "prefetch" and pins.get("offload", "none") != "none"
        if key in pins and pins.get("zero", 3) < least and not of_host:
            message = f"{key} = {pins[key]} is of zero >= {least}, here zero = {pins['zero']}, so it changes nothing"
            found.append(Diagnostic("T251", message, spec.span(f"parallel.{key}"), severity="warning"))
    if pins.get("sequence_parallel") and pins.get("tensor") == 1:
        message = "sequence_parallel shards over tensor, which is 1 here, so it changes nothing"
        found.append(Diagnostic("T251", message, spec.span("parallel.sequence_parallel"), severity="warning"))
    if "schedule" in pins and pins.get("pipeline") == 1 and len(pins.get("stages", ())) < 2:
        row = schedule_row(pins["schedule"])
        if row.chunks > 1 or row.copies > 1:
            message = f"{row.name} orders several chunks or copies, pipeline = 1 has one stage: it changes nothing"
            found.append(Diagnostic("T251", message, spec.span("parallel.schedule"), severity="warning"))
    found += _filled_up(spec, pins)
    stages, number = pins.get("pipeline", 1), spec.train.global_batch // max(pins.get("data", 1), 1)
    number //= max(pins.get("micro_batch", 1), 1)
    if "data" in pins and 0 < number < stages:
        share = (stages - 1) / (number + stages - 1)
        message = f"{number} micro-batches on {stages} stages: with one chunk each, bubble_fraction = {share:.3g}"
        near = (f"global_batch = {stages * (spec.train.global_batch // number)}",)
        found.append(Diagnostic("T254", message, spec.span("parallel.pipeline"), severity="warning", nearest=near))
    return found
