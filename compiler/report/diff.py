"""`titan diff`: what differs between two plans, in words and numbers, from what they are down to what they cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.listing import weighted
from titan.compiler.plan.program import Parameter, Plan, Role
from titan.compiler.plan.sizes import Sizes, memory_by_component

SHOWN = 6  # of many alike, such as parameters


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing: where it is (`train.micro_batch`), its text in the first and in the second plan, and a remark: the
    change of a number."""

    place: str
    first: str
    second: str
    remark: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.place:<34} {self.first} -> {self.second}" + (f"   ({self.remark})" if self.remark else "")


def compare(first: Plan, second: Plan) -> list[Difference]:
    """All differences; empty exactly when the plans are equal."""
    if first == second:
        return []
    found = [*_settings(first, second), *_mesh(first, second), *_parameters(first, second), *_work(first, second)]
    return found or [Difference("instructions", "another order or operands", "of the same number of instructions")]


def number(place: str, first: float, second: float) -> Iterator[Difference]:
    """A difference of two numbers, with the change in percent."""
    if first != second:
        remark = f"{(second - first) / first:+.1%}" if first else ""
        yield Difference(place, _figure(first), _figure(second), remark)


def _figure(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _text(value: Any) -> str:
    return "none" if value is None else str(value)


def _settings(first: Plan, second: Plan) -> Iterator[Difference]:
    """Settings leaf by leaf, but for the reasons of choices and the sources of figures, which only say why."""
    left, right = (dict(_leaves("", plan.setting_table)) for plan in (first, second))
    for key in dict.fromkeys((*left, *right)):
        if left.get(key) != right.get(key) and not _is_remark(key):
            yield from _values(key, left.get(key), right.get(key))


def _is_remark(key: str) -> bool:
    return key.startswith("strategy.reasons") or key.endswith(".source")


def _values(key: str, first: Any, second: Any) -> Iterator[Difference]:
    numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (first, second))
    if numeric:
        yield from number(key, first, second)
    else:
        yield Difference(key, _text(first), _text(second))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(f"{path}.{key}" if path else key, inner)
    else:
        yield path, value


def _mesh(first: Plan, second: Plan) -> Iterator[Difference]:
    left, right = dict(first.mesh.factors), dict(second.mesh.factors)
    for axis in dict.fromkeys((*left, *right)):
        yield from number(f"mesh {axis}", left.get(axis, 1), right.get(axis, 1))
    yield from number("ranks", first.mesh.world_size, second.mesh.world_size)


def _parameters(first: Plan, second: Plan) -> Iterator[Difference]:
    """Parameters that only one plan has, and those that lie otherwise."""
    left, right = first.parameter_table, second.parameter_table
    for name, here, there in (("only in the first", left, right), ("only in the second", right, left)):
        missing = [key for key in here if key not in there]
        if missing:
            more = ", ..." if len(missing) > SHOWN else ""
            yield Difference(f"parameters {name}", str(len(missing)), ", ".join(missing[:SHOWN]) + more)
    changed = Counter(
        (_lies(left[key]), _lies(right[key])) for key in left if key in right and _lies(left[key]) != _lies(right[key])
    )
    for (before, after), count in changed.most_common(SHOWN):
        yield Difference(f"layout of {count} parameter{'s' if count > 1 else ''}", before, after)


def _lies(parameter: Parameter) -> str:
    layout = " ".join(f"{state}@{factor}" for factor, state in parameter.tensor.layout if state not in ("R", "I"))
    return f"{parameter.tensor.dtype} {layout or 'whole'}"


def _work(first: Plan, second: Plan) -> Iterator[Difference]:
    """Per role: layers, instructions by opcode, traffic and memory."""
    yield from number("roles", len(first.roles), len(second.roles))
    left_sizes, right_sizes = Sizes(first), Sizes(second)
    for left, right in zip(first.roles, second.roles):
        place = f"role {left.pipeline}"
        if left.layers != right.layers:
            yield Difference(f"{place} layers", *(" + ".join(str(len(c)) for c in r.layers) for r in (left, right)))
        before, after = _totals(left, left_sizes), _totals(right, right_sizes)
        for key in dict.fromkeys((*before, *after)):
            yield from number(f"{place} {key}", before.get(key, 0), after.get(key, 0))


def _totals(role: Role, sizes: Sizes) -> dict[str, int]:
    """Instructions of a step by opcode, bytes sent by group, and bytes of memory by component, on one rank."""
    calls = Counter(role.called("train"))
    found: Counter[str] = Counter()
    for block in role.blocks:
        times = calls[block.name]
        for instruction, copies in weighted(block.instructions) if times else ():
            found[f"{instruction.opcode} count"] += times * copies
            wire = sizes.traffic(instruction).wire
            if wire:
                found[f"bytes sent over {instruction.group}"] += times * copies * wire
    memory = memory_by_component(sizes.plan, role, sizes)
    return {**dict(sorted(found.items())), **{f"{name} bytes": size for name, size in memory.items()}}
