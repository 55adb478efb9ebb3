"""From measured seconds to a cluster's figures and curves.

A curve is the median of what was measured at each size, made to rise and thinned to a few points; what several shapes
of one size differ by is left as error. Only one parameter is fitted by search: how much a small dim of a matrix product
counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from math import exp, log
from statistics import mean, median

from titan.compiler.cost.curves import PRODUCTS, Curve, curve_name, operator_size
from titan.compiler.cost.prices import FREE, Prices
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.operators import TensorType
from titan.compiler.plan.program import Plan
from titan.compiler.plan.segment import Call, Segment, parse_unit

Shapes = tuple[tuple[int, ...], ...]
Key = tuple[str, str, Shapes]  # operator, phase, shapes of what the function is given
Points = Sequence[tuple[float, float]]  # (size, seconds)
Shares = Mapping[tuple[str, str], float]  # by segment and opcode

PHASES = ("forward", "backward", "backward_input", "backward_weight")
HALVES = (0.0, 1.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0)
CLOSE = 1.25  # sizes nearer than this are one point
MOST = 16  # points of a curve
SHORT = 2e-3  # seconds of a segment that shows what the interpreter takes
LEAST = 1e-7  # seconds of what is too short to be seen


@dataclass(frozen=True, slots=True)
class Watched:
    """One probe on one rank: seconds of operators by key, and of every instruction of its order in each step."""

    operators: Mapping[Key, Sequence[float]]
    instructions: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Sample:
    """A call of an operator in a phase, with what it was given and how long it took."""

    call: Call
    operands: tuple[TensorType, ...]
    results: tuple[TensorType, ...]
    phase: str
    seconds: float


@dataclass(slots=True)
class Fitted:
    """Curves by name, and figures."""

    curves: dict[str, Curve] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)


def fit_curve(points: Points) -> Curve:
    """A rising curve through the medians of points of nearly one size."""
    groups: list[list[tuple[float, float]]] = []
    for point in sorted(points):
        if groups and point[0] < groups[-1][0][0] * CLOSE:
            groups[-1].append(point)
        else:
            groups.append([point])
    merged = [(exp(mean(log(s) for s, _ in g)), median(t for _, t in g), len(g)) for g in groups]
    return _thinned(_rising(merged))


def _rising(points: list[tuple[float, float, int]]) -> list[tuple[float, float]]:
    """Neighbours that fall get their common mean (pool adjacent violators), in logarithms."""
    blocks: list[list[tuple[float, float, int]]] = []
    for point in points:
        blocks.append([point])
        while len(blocks) > 1 and _level(blocks[-2]) > _level(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    return [(size, exp(_level(block))) for block in blocks for size, _, _ in block]


def _level(block: list[tuple[float, float, int]]) -> float:
    return sum(log(t) * n for _, t, n in block) / sum(n for *_, n in block)


def _thinned(points: list[tuple[float, float]]) -> Curve:
    """Leaves out the points that a straight line between their neighbours gives best, while there are too many."""
    kept = list(points)
    while len(kept) > MOST:
        errors = []
        for k in range(1, len(kept) - 1):
            line = Curve((kept[k - 1][0], kept[k + 1][0]), (kept[k - 1][1], kept[k + 1][1]))
            errors.append((abs(log(line(kept[k][0]) / kept[k][1])), k))
        del kept[min(errors)[1]]
    return Curve(tuple(s for s, _ in kept), tuple(t for _, t in kept))


# --- operators


def samples_of(plan: Plan, ranks: Sequence[Watched], shares: Shares | None = None) -> Iterator[Sample]:
    """What the ranks of a probe measured: their mean; of a plan that they share, the slowest rank's. Operators that
    were timed one by one take the `shares` of their segment's time that they take there."""
    for segment in plan.segments:
        for call in segment.body:
            for phase in PHASES:
                key = key_of(segment, call, phase)
                found = [median(rank.operators[key]) for rank in ranks if key in rank.operators]
                if found:
                    seconds = max(found) if plan.mesh.world_size > 1 else mean(found)
                    seconds *= shares.get((segment.name, _pass(phase)), 1.0) if shares else 1.0
                    types = segment.types
                    operands = tuple(types[name] for name in call.operands)
                    yield Sample(call, operands, tuple(types[name] for name in call.results), phase, seconds)


def key_of(segment: Segment, call: Call, phase: str) -> Key:
    """A forward is given its operands, a backward what was saved and the gradients of the main results."""
    row, types = call.row, segment.types
    if phase == "forward":
        return call.operator, phase, tuple(types[name].shape for name in call.operands)
    named = dict(zip(row.operands + row.results, call.operands + call.results, strict=True))
    saved = row.saves_weight if phase == "backward_weight" and not row.weight_with_input else row.saves
    names = (*(named[name] for name in saved), *call.results[: len(row.main_results)])
    return call.operator, phase, tuple(types[name].shape for name in names)


def dtype_of(sample: Sample) -> str:
    """The dtype that names the curve: that of the values, not of tokens."""
    tokens = sample.call.row.data[:1] == ("tokens",)
    return sample.operands[1 if tokens else 0].dtype


def fit_operators(samples: Iterable[Sample]) -> Fitted:
    """Curves of all operators and phases; `matmul_half_dim` is what makes products of unlike shapes lie best on one."""
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(curve_name(sample.call.operator, sample.phase, dtype_of(sample)), []).append(sample)
    products = [found for found in by_name.values() if found[0].call.operator in PRODUCTS]
    half = min(HALVES, key=lambda h: sum(_scatter(_points(found, h)) for found in products)) if products else 0.0
    fitted = Fitted(figures={"matmul_half_dim": half})
    fitted.curves = {name: fit_curve(_points(found, half)) for name, found in sorted(by_name.items())}
    return fitted


def _points(samples: Iterable[Sample], half: float) -> list[tuple[float, float]]:
    return [(operator_size(s.call, s.operands, s.results, half), s.seconds) for s in samples]


def _scatter(points: Points) -> float:
    curve = fit_curve(points)
    return sum(log(curve(size) / seconds) ** 2 for size, seconds in points)


def peak_rate(samples: Iterable[Sample], dtype: str) -> float | None:
    """FLOP/s of the fastest matrix product that was seen."""
    rates = [
        s.call.row.flops(dict(s.call.attributes), s.operands).forward / s.seconds
        for s in samples
        if s.call.operator == "linear" and dtype_of(s) == dtype
    ]
    return max(rates, default=None)


# --- instructions


def shares_of(plan: Plan, ranks: Sequence[Watched], host: float, around: float) -> Shares:
    """How much longer operators take in each segment of a probe than one by one, their calls counted: gradients are
    summed between them, memory is freed, caches are left to the next; what one kernel does together takes less."""
    runs: dict[tuple[str, str], list[float]] = {}
    for key, seconds, inside in _segments(plan, ranks):
        runs.setdefault(key, []).append(max(seconds - host - around * len(inside), LEAST) / sum(inside))
    return {key: mean(found) for key, found in runs.items()}


def fit_instructions(probes: Sequence[tuple[Plan, Sequence[Watched]]], ahead: bool = False) -> Fitted:
    """The interpreter's own time for an instruction and around a call, and curves of instructions without a segment.
    `ahead`: the device computes by itself while the host asks for more, which only shows where it is the slower one.
    """
    bare: list[float] = []
    for plan, ranks in probes:
        for instruction, seconds in _instructions(plan, ranks):
            bare += [seconds] if instruction.opcode == "free" else []
    host = median(bare) if bare else 0.0
    around: list[float] = []
    points: dict[str, list[tuple[float, float]]] = {}
    for plan, ranks in probes:
        prices = Prices(plan)
        around += _around(plan, ranks, host)
        for instruction, seconds in _instructions(plan, ranks):
            if not (instruction.row.asynchronous or instruction.row.unit or instruction.opcode in FREE):
                size = max(prices.plain_bytes(instruction), 1.0)
                points.setdefault(instruction.opcode, []).append((size, max(seconds - host, LEAST)))
    curves = {name: fit_curve(found) for name, found in sorted(points.items())}
    if ahead:
        return Fitted(curves, {"instruction_seconds": 0.0, "call_seconds": 0.0, "host_seconds": _asking(probes, host)})
    figures = {"instruction_seconds": host, "call_seconds": max(median(around), 0.0) if around else 0.0}
    return Fitted(curves, figures)


def _asking(probes: Sequence[tuple[Plan, Sequence[Watched]]], host: float) -> float:
    """Seconds in which the host asks for one operator: of segments that take far longer than the device does."""
    found = [
        (seconds - host) / len(inside)
        for plan, ranks in probes
        for _, seconds, inside in _segments(plan, ranks)
        if seconds > 2 * sum(inside)
    ]
    return max(median(found), 0.0) if found else 0.0


def _instructions(plan: Plan, ranks: Sequence[Watched]) -> Iterator[tuple[Instruction, float]]:
    """Instructions of a plan for one rank with their median seconds; of a shared one, where ranks wait, nothing."""
    if plan.mesh.world_size == 1:
        yield from _timed(plan, ranks)


def _timed(plan: Plan, ranks: Sequence[Watched]) -> Iterator[tuple[Instruction, float]]:
    """Instructions of a plan of one role with their median seconds, of the mean rank."""
    for n, (*_, instruction) in enumerate(plan.role_of(0).instructions("train")):
        yield instruction, mean(median(step[n] for step in rank.instructions) for rank in ranks)


def _around(plan: Plan, ranks: Sequence[Watched], host: float) -> Iterator[float]:
    """Seconds of short segments beside those of their operators, for each call; in long ones it is lost in noise."""
    for _, seconds, inside in _segments(plan, ranks):
        if seconds < SHORT:
            yield (seconds - host - sum(inside)) / len(inside)


def _segments(plan: Plan, ranks: Sequence[Watched]) -> Iterator[tuple[tuple[str, str], float, list[float]]]:
    """Each run of a segment by name and opcode, with its seconds and those of its operators one by one."""
    known: dict[tuple[str, str], list[float]] = {}
    for segment in plan.segments:
        for call in segment.body:
            for phase in PHASES:
                key = key_of(segment, call, phase)
                found = [median(r.operators[key]) for r in ranks if key in r.operators]
                if found:
                    known.setdefault((segment.name, _pass(phase)), []).append(mean(found))
    for instruction, seconds in _timed(plan, ranks):
        if instruction.opcode in ("forward", "backward"):
            run = (parse_unit(instruction.unit)[0], instruction.opcode)
            if inside := known.get(run):
                yield run, seconds, inside


def _pass(phase: str) -> str:
    """The opcode whose unit has an operator's phase."""
    return "forward" if phase == "forward" else "backward"
