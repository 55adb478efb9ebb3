"""Ring attention: keys and values pass from rank to rank, and every rank's queries meet each of them in turn.

The pass replaces an attention by its steps. In step j a rank holds the keys and values that started j ranks before it;
they are passed on before the step computes, so that the next ones arrive meanwhile. Results are merged by their
log-sum-exps. Steps in which no rank sees any of the keys, because of a window, are left out: the keys go as many ranks
further at once. Backward follows mechanically: gradients of keys and values travel the ring the other way and are home
after the last hop; the keys and values themselves are not kept but travel with them (`compiler/passes/transpose.py`).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest

from titan.compiler.graph.model_graph import Convert, ModelGraph, Op, Part, active_factors
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.mesh import Mesh
from titan.compiler.plan.operators import statistics_dtype
from titan.compiler.plan.segment import Segment
from titan.compiler.plan.sequence import needed_steps
from titan.compiler.strategy import Strategy


def ring_factor(graph: ModelGraph) -> str:
    """The factor whose ranks form the rings; empty when there is none."""
    found = [f for f in active_factors(graph.mesh) if f in ("context", "context.ring")]
    return found[0] if found else ""


def ring(graph: ModelGraph, strategy: Strategy) -> ModelGraph:
    """Replaces attention by ring steps where the context form says so."""
    factor = ring_factor(graph)
    if strategy.context_form != "ring" or not factor:
        return graph
    size = graph.mesh.size(factor)
    zigzag = size if strategy.context_order == "zigzag" else 0
    graph = graph.with_parts(tuple(_Ring(part, factor, size, bool(zigzag)).run() for part in graph.parts))
    return replace(graph, zigzag=zigzag)


class _Ring:
    """One part."""

    def __init__(self, part: Part, factor: str, size: int, zigzag: bool) -> None:
        self.part, self.factor, self.size, self.zigzag = part, factor, size, zigzag
        self.values = dict(part.table)
        self.steps: list[Op | Convert] = []

    def run(self) -> Part:
        for step in self.part.steps:
            assert not hasattr(step, "body"), "rings are made before segments"
            if isinstance(step, Op) and step.operator in ("attention", "attention_documents"):
                self._attention(step)
            elif isinstance(step, Op | Convert):
                self.steps.append(step)
        return replace(self.part, values=tuple(self.values.values()), steps=tuple(self.steps))

    def _attention(self, op: Op) -> None:
        queries, keys = self._first(op.operands[0]), self._pair(op.operands[1], op.operands[2])
        starts, kind = op.operands[3:], op.operator.removeprefix("attention")
        out, lse = op.results
        partial: tuple[str, ...] = ()
        length = self.values[queries].shape[1] // self.size
        steps = needed_steps(self.size, self.zigzag, length, int(dict(op.attributes).get("window", 0)))
        for step, following in zip_longest(steps, steps[1:]):
            final = following is None
            now = keys
            if not final:
                keys = self._shift(keys, following, following - step)
            results = (out, lse) if final else self._partial(out, lse, step)
            attributes = (*op.attributes, ("step", step), ("ring", self.size), ("rank", f"@{self.factor}*1"))
            attributes = (*attributes, ("zigzag", self.zigzag), ("final", final))
            operator = ("attention_merge" if step else "attention_block") + kind
            self.steps.append(Op(operator, results, (queries, now, *starts, *partial), attributes))
            partial = results

    def _first(self, name: str) -> str:
        """The rank's own piece, whose gradient is a sum over all steps."""
        result = f"{name}.ring0"
        self.values[result] = replace(self.values[name], name=result, wide=True)
        self.steps.append(Op("wide_gradient", (result,), (name,), (("dtype", self.values[name].dtype),)))
        return result

    def _pair(self, keys: str, values: str) -> str:
        """Keys and values as one tensor: one message passes both on."""
        like, result = self.values[keys], "kv.ring0"
        dims, shape = ("pair", *like.dims), (2, *like.shape)
        self.values[result] = replace(like, name=result, dims=dims, shape=shape, wide=True)
        self.steps.append(Op("pack_keys", (result,), (keys, values), (("dtype", like.dtype),)))
        return result

    def _shift(self, name: str, step: int, hops: int) -> str:
        result = f"{name.rpartition('.ring')[0]}.ring{step}"
        self.values[result] = replace(self.values[name], name=result)
        self.steps.append(Convert(result, name, "shift", "shift", self.factor, None, None, hops=hops))
        return result

    def _partial(self, out: str, lse: str, step: int) -> tuple[str, str]:
        names = (f"{out}.part{step}", f"{lse}.part{step}")
        wide = statistics_dtype(self.values[out].dtype)
        for name, final in zip(names, (out, lse), strict=True):
            self.values[name] = replace(self.values[final], name=name, dtype=wide)
        return names


def shifts(part: Part) -> tuple[Convert, ...]:
    """The steps of a part that pass values along a ring. Their results are not kept: in backward they come around
    again."""
    return tuple(step for step in part.steps if isinstance(step, Convert) and step.forward == "shift")


def pass_on(result: str, source: str, group: str, stream: str, peer: int) -> list[Instruction]:
    """Sends `source` to the rank `peer` further on the ring and receives `result` from the rank on the other side."""
    attributes = (("peer", peer),)
    return [
        Instruction("send", (f"t.{result}?",), (source,), (), "", group, f"{group}.{stream}", attributes),
        Instruction("recv", (f"{result}?",), (), (), "", group, f"{group}.{stream}", (("peer", -peer),)),
    ]


def arrive(result: str) -> list[Instruction]:
    """Waits for both halves of `pass_on`."""
    return [Instruction("wait", (result,), (f"{result}?",)), Instruction("wait", (), (f"t.{result}?",))]


@dataclass(frozen=True, slots=True)
class Rotation:
    """A value that comes around the ring again in backward, from the rank `hops` further on. `result` of the last step
    is what some rank started with, on the shorter way; that of an earlier step what a rank had in the step after."""

    result: str
    source: str
    group: str
    hops: int


def rotations(part: Part) -> dict[int, list[Rotation]]:
    """What backward passes on before it visits the step of each index, one step ahead of the block that needs it; the
    first ones (`leading`) go ahead of the whole part."""
    readers = {v: n for n, step in enumerate(part.steps) if isinstance(step, Segment) for v in step.inputs}
    after = {shift.source: shift for shift in shifts(part)}
    found: dict[int, list[Rotation]] = {}
    for shift in shifts(part):
        later = after.get(shift.result)
        if later is not None:
            rotation = Rotation(shift.result, later.result, shift.group, later.hops)
            found.setdefault(readers[later.result], []).append(rotation)
    return found


def leading(part: Part, mesh: Mesh) -> tuple[Rotation, ...]:
    """The first rotations of backward. They pass on what a rank started with, which is there long before: issued
    under the attention of the layer above they hide like all others."""
    before, sources = {shift.result: shift for shift in shifts(part)}, {shift.source for shift in shifts(part)}
    found = []
    for shift in shifts(part):
        if shift.result not in sources:
            first, gone = shift.source, shift.hops
            while first in before:
                first, gone = before[first].source, gone + before[first].hops
            ring = mesh.size(shift.group)
            hops = ring - gone if 2 * gone >= ring else -gone
            found.append(Rotation(shift.result, first, shift.group, hops))
    return tuple(found)


def visited_last(part: Part) -> str:
    """The segment whose backward is the last block of a ring; empty without a ring."""
    sources = {shift.source for shift in shifts(part)} - {shift.result for shift in shifts(part)}
    found = (s.name for s in part.steps if isinstance(s, Segment) and s.body[0].row.alone and sources & {*s.inputs})
    return next(found, "")


def homeward(part: Part) -> dict[int, list[Convert]]:
    """Shifts whose gradients backward sends home before it visits the block of each index: those that forward issues
    right before that block."""
    found: dict[int, list[Convert]] = {}
    waiting: list[Convert] = []
    for index, step in enumerate(part.steps):
        if isinstance(step, Convert) and step.forward == "shift":
            waiting.append(step)
        elif waiting:
            found[index], waiting = waiting, []
    return found
