"""Recompute: what each tier stores of a layer until its backward, and how the rest is made again.

    none       everything that backward reads
    selective  not the results of norms and activation functions (and gathers of them), whose operands are stored
    full       only the layer's input, output and log-sum-exp of attention, and what a sum over ranks has made; of
               latent attention, whose output is wider than the input, nothing

So no other attention runs twice and no sum over ranks is repeated; of the other collectives a rebuild repeats those
that gather or exchange. In an adaptive plan it repeats none at all: then ranks may choose tiers each for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from titan.compiler.graph.model_graph import Convert, ModelGraph, Part
from titan.compiler.passes.transpose import collective
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.segment import TIERS, Call, Rebuild, Segment
from titan.compiler.strategy import Strategy

if TYPE_CHECKING:
    from titan.compiler.passes.blocks import Names

CHEAP = frozenset(("rms_norm", "layer_norm", "swiglu", "gelu", "relu", "bias", "add", "dropout", "rope"))
REPEATED = {"selective": ("all_gather",), "full": ("all_gather", "all_to_all")}  # collectives of a rebuild


def recompute(graph: ModelGraph, strategy: Strategy) -> ModelGraph:
    """Notes in the segments of layers what each tier drops and rebuilds, where any layer's tier is not `none`."""
    if not strategy.recomputes:
        return graph
    adaptive = strategy.recompute == "adaptive"
    return graph.with_parts(tuple(_noted(p, adaptive) if p.repeated else p for p in graph.parts))


def _noted(part: Part, adaptive: bool) -> Part:
    tiers = Tiers(part, adaptive)
    rebuilds: dict[str, list[Rebuild]] = {}
    for tier in TIERS[1:]:
        for step in tiers.steps(tier):
            if not isinstance(step, Convert):
                rebuilds.setdefault(step[0].name, []).append(step[1])
    steps = tuple(
        replace(step, drops=tiers.drops(step), rebuilds=tuple(rebuilds.get(step.name, ())))
        if isinstance(step, Segment)
        else step
        for step in part.steps
    )
    return replace(part, steps=steps)


class Tiers:
    """The tiers of one kind of layer. Values that a conversion leaves as they are go by the name of their source."""

    def __init__(self, part: Part, adaptive: bool) -> None:
        self.part, self.adaptive = part, adaptive
        self.alias = aliases(part)
        self.made: dict[str, tuple[int, Call | Convert]] = {}
        for step in part.steps:
            if isinstance(step, Convert) and step.forward != "none":
                self.made[step.result] = (len(self.made), step)
            elif isinstance(step, Segment):
                for call in step.body:
                    self.made |= {result: (len(self.made) + n, call) for n, result in enumerate(call.results)}
        self._stored: dict[str, frozenset[str]] = {}
        self._steps: dict[str, tuple[Convert | tuple[Segment, Rebuild], ...]] = {}

    def name(self, value: str) -> str:
        return self.alias.get(value, value)

    @cached_property
    def around(self) -> frozenset[str]:
        """What comes around a ring again in backward, and so is neither stored nor rebuilt."""
        return frozenset(s.result for s in self.part.steps if isinstance(s, Convert) and s.forward == "shift")

    @cached_property
    def passed(self) -> frozenset[str]:
        """What backward passes on along a ring: in an adaptive plan its register must not depend on a tier."""
        steps = (s for s in self.part.steps if isinstance(s, Convert) and s.forward == "shift")
        return frozenset(self.name(s.source) for s in steps)

    @cached_property
    def kept(self) -> tuple[str, ...]:
        """What backward reads, in the order in which it is made."""
        found = {self.name(v) for s in self.part.steps if isinstance(s, Segment) for v in s.kept} - self.around
        return tuple(sorted(found, key=lambda v: self.made[v][0] if v in self.made else -1))

    def stored(self, tier: str) -> frozenset[str]:
        if tier not in self._stored:
            found = {*self.part.inputs, *(self.kept if tier == "none" else ())}
            for value in self.kept:
                if not self._can_be_made(value, tier, found):
                    found.add(value)
            self._stored[tier] = frozenset(found)
        return self._stored[tier]

    def _can_be_made(self, value: str, tier: str, stored: set[str]) -> bool:
        if value in stored or self.part.table[value].kind == "parameter":
            return True
        if self.adaptive and value in self.passed:
            return False
        _, maker = self.made.get(value, (0, None))
        if isinstance(maker, Convert):
            repeated = not self.adaptive and maker.forward in REPEATED[tier]
            return repeated and self._can_be_made(self.name(maker.source), tier, stored)
        if maker is None or maker.operator.startswith("attention") or (tier != "full" and maker.operator not in CHEAP):
            return False
        return all(self._can_be_made(self.name(o), tier, stored) for o in maker.operands)

    def drops(self, segment: Segment) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Values of the segment's frame that a tier drops and the tier before stores."""
        found, before = [], self.stored("none")
        for tier in TIERS[1:]:
            values = tuple(v for v in segment.frame if v in before and v not in self.stored(tier))
            before = self.stored(tier)
            found += [(tier, values)] if values else []
        return tuple(found)

    def steps(self, tier: str) -> tuple[Convert | tuple[Segment, Rebuild], ...]:
        """What a rebuild runs, in order."""
        if tier not in self._steps:
            self._steps[tier] = self._work_out(tier)
        return self._steps[tier]

    def _work_out(self, tier: str) -> tuple[Convert | tuple[Segment, Rebuild], ...]:
        stored = self.stored(tier)
        needed = set(self.kept) - stored
        found: list[Convert | tuple[Segment, Rebuild]] = []
        for step in reversed(self.part.steps):
            if isinstance(step, Convert) and step.result in needed:
                found.append(step)
                needed |= {self.name(step.source)} - stored
            elif isinstance(step, Segment):
                again = self._segment(step, tier, needed)
                if again is not None:
                    found.append((step, again))
                    needed |= {self.name(v) for v in again.reads} - stored
        return tuple(reversed(found))

    def _segment(self, segment: Segment, tier: str, needed: set[str]) -> Rebuild | None:
        stored = self.stored(tier)
        writes = tuple(v for v in segment.outputs if v in needed)
        wanted = {*writes, *(v for v in segment.frame if v in needed)}
        if not wanted:
            return None
        inside = {result for call in segment.body for result in call.results}
        reads: set[str] = set()
        for call in reversed(segment.body):
            if wanted.intersection(call.results):
                reads.update(o for o in call.operands if o not in inside or o in stored)
                wanted.update(o for o in call.operands if o in inside and o not in stored)
        return Rebuild(tier, tuple(v for v in (*segment.inputs, *segment.outputs) if v in reads), writes)

    @cached_property
    def made_again(self) -> dict[str, frozenset[str]]:
        """Values that have a register of their own in backward, by tier."""
        found = {}
        for tier in TIERS:
            steps = self.steps(tier)
            results = [(s.result,) if isinstance(s, Convert) else s[1].writes for s in steps]
            found[tier] = self.around.union(*results)
        return found


def aliases(part: Part) -> dict[str, str]:
    """Values that a conversion leaves as they are, with the value whose register they have."""
    found: dict[str, str] = {}
    for step in part.steps:
        if isinstance(step, Convert) and step.forward == "none":
            found[step.result] = found.get(step.source, step.source)
    return found


@dataclass(frozen=True)
class Layer:
    """One layer of a chunk in one tier: names of registers in backward, and the rebuild that comes before it."""

    tiers: Tiers
    tier: str
    names: Names

    def register(self, value: str) -> str:
        value = self.tiers.name(value)
        again = value in self.tiers.made_again[self.tier]
        return f"r.{self.names.register(value)}" if again else self.names.register(value)

    def frame(self, segment: Segment) -> tuple[str, ...]:
        """The pieces of a frame as backward reads them."""
        stored = segment.stored(self.tier)
        return tuple(("" if p in stored else "r.") + self.names.piece(p, segment.name) for p in segment.pieces)

    def rebuild(self, buffers: Callable[[Iterable[str]], tuple[tuple[str, ...], tuple[str, ...]]]) -> list[Instruction]:
        emitted: list[Instruction] = []
        for step in self.tiers.steps(self.tier):
            if isinstance(step, Convert):
                moved = (self.register(step.result), self.register(step.source))
                emitted += collective(step.forward, *moved, step, step.source_dim, step.target_dim)
                continue
            segment, again = step
            used = {o for call in segment.rebuild_body(self.tier) for o in call.operands}
            pieces, stored = self.frame(segment), segment.stored(self.tier)
            writes = (*map(self.register, again.writes), *(p for p in pieces if p.startswith("r.")))
            reads = (*map(self.register, again.reads), *pieces[: len(stored)])
            parameters = buffers(p for p in segment.parameters if p in used)[0]
            unit, tier = self.names.unit(segment.name), (("tier", self.tier),)
            emitted.append(Instruction("recompute", writes, (*reads, *parameters), (), unit, attributes=tier))
        return emitted


def alternatives(variants: Mapping[str, list[Instruction]], frame: str) -> list[Instruction]:
    """One list of what each tier does: instructions that not all tiers share are marked with those that run them, and
    with the register that holds the tier."""
    if len(variants) == 1:
        return list(*variants.values())
    rest = {tier: list(instructions) for tier, instructions in variants.items()}
    merged: list[Instruction] = []
    while any(rest.values()):
        heads = [left[0] for left in rest.values() if left]
        chosen = next((h for h in heads if all(h in left[:1] or h not in left for left in rest.values())), heads[0])
        tiers = [tier for tier, left in rest.items() if left[:1] == [chosen]]
        for tier in tiers:
            del rest[tier][0]
        merged.append(chosen if len(tiers) == len(rest) else chosen.only(frame, tiers))
    return merged
