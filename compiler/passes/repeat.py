"""Layers that are alike are lowered once: of a run of them in a chunk a few are lowered, one of which is repeated.

What surrounds a layer in a block reaches a few layers far (gathers ahead of their use, the ends of what the layer
before has begun). So a model with shorter runs has the same blocks but for the number of layers in the middle of each
run: its blocks are written, and the instructions of the layer in the middle are repeated for those left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby, pairwise

from titan.compiler.graph.model_graph import ModelGraph
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.listing import Listing, Renaming, Stretch, centre, layers_of, names_of
from titan.compiler.plan.program import Block
from titan.compiler.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Run:
    """Alike layers of which some are left out: `middle` is the one that is repeated, by its number in the shorter
    model, for `more` layers."""

    middle: int
    more: int


class Irregular(Exception):
    """Instructions of layers that are alike are not."""


@dataclass(frozen=True)
class Shorter:
    """A model's graph and strategy with shorter runs. `reach`: how far around its layer an instruction may reach."""

    graph: ModelGraph
    strategy: Strategy
    runs: tuple[Run, ...]
    reach: int

    def layer(self, number: int) -> int:
        """The layer that has this number in the shorter model and is not in the middle of a run.

        Raises Irregular when it is: there it stands for many.
        """
        if any(abs(number - run.middle) <= 1 for run in self.runs):
            raise Irregular(f"layer {number} of the shorter model is named apart from its run")
        return number + sum(run.more for run in self.runs if run.middle < number)

    @cached_property
    def _apart(self) -> Renaming:
        return Renaming(self.layer)

    def longer(self, block: Block) -> Block:
        """A block of the whole model from that of the shorter one.

        Raises Irregular when the layers around the middle of a run differ.
        """
        listed = block.instructions
        first: dict[int, int] = {}
        for index, layer in enumerate(centre(listed)):
            if layer is not None:
                first.setdefault(layer, index)
        inside = [run for run in self.runs if run.middle in first]
        if not inside:
            return replace(block, instructions=self._moved(block, listed, self._apart))
        onward = list(first) == sorted(first)
        step = 1 if onward else -1
        bounds = [-1, *(run.middle for run in inside), sum(self.strategy.stages)]
        regions = list(pairwise(bounds))[::step]
        found: list[Stretch] = []
        place = 0
        for run, region in zip(inside[::step], regions, strict=False):
            start, stop, after, alike = self._alike(block, first, run.middle, step)
            found.append(Stretch(self._region(block, slice(place, start), region)))
            found.append(Stretch(self._region(block, slice(start, stop), region), run.more + alike, step))
            place = after
        found.append(Stretch(self._region(block, slice(place, None), regions[-1])))
        return replace(block, instructions=Listing(tuple(found)))

    def _alike(self, block: Block, first: Mapping[int, int], middle: int, step: int) -> tuple[int, int, int, int]:
        """Instructions of the first layer around the middle of a run from which on all have the same ones: from where
        to where, the end of those of the last, and how many layers they are. `first`: of each layer."""
        on, layers = Renaming.by(step), list(first)
        number = layers.index(middle)
        parts = [block.instructions[first[a] : first[b]] for a, b in pairwise(layers)]

        def follows(n: int) -> bool:
            """Whether the layer after the n-th one does the same."""
            inside = number - self.reach - 1 <= n < number + self.reach and 0 <= n < len(parts) - 1
            return inside and on.same(parts[n], parts[n + 1])

        low = high = number
        while follows(low - 1):
            low -= 1
        while follows(high):
            high += 1
        if low == number or high == number:
            raise Irregular(f"block {block.name}: layers around {middle} of the shorter model differ")
        return first[layers[low]], first[layers[low + 1]], first[layers[high + 1]], high - low + 1

    def _region(self, block: Block, part: slice, region: tuple[int, int]) -> tuple[Instruction, ...]:
        """Instructions between the middles of two runs."""
        listed = block.instructions[part]
        names = {name for i in listed if not _of_next(block, i) for name in names_of(i)}
        low, high = region[0] - self.reach, region[1] + self.reach
        if any(not low <= layer <= high for name in names for layer in layers_of(name)):
            raise Irregular("an instruction names layers that are far from its own")
        return self._moved(block, listed, self._between(region))

    def _between(self, region: tuple[int, int]) -> Renaming | None:
        """From layers between the middles of two runs: those of other ranks may have runs between these.

        Raises Irregular for a layer in the middle of such a run.
        """
        low, high = region
        passed = sum(run.more for run in self.runs if run.middle <= low)
        others = [run for run in self.runs if low < run.middle < high]

        def layer(number: int) -> int:
            if any(abs(number - run.middle) <= 1 for run in others):
                raise Irregular(f"layer {number} of the shorter model is named apart from its run")
            return number + passed + sum(run.more for run in others if run.middle < number)

        return Renaming(layer) if passed or others else None

    def _moved(self, block: Block, listed: Sequence[Instruction], renaming: Renaming | None) -> tuple[Instruction, ...]:
        """What belongs to the element that follows is of the first or last layers of its chunk; `renaming`: of all
        else, if it needs one."""
        keep = renaming.instruction if renaming else lambda i: i
        return tuple(self._apart.instruction(i) if _of_next(block, i) else keep(i) for i in listed)


def _of_next(block: Block, instruction: Instruction) -> bool:
    following = block.parameters[1:]
    return bool(following) and any(name.rstrip("?").partition(":")[2] in following for name in instruction.writes)


def written(strategy: Strategy) -> int | None:
    """How many alike layers of a chunk are written: those that gathers from so many layers ahead reach, a layer around
    them, and three that must have the same instructions. None: all are. Elements that are interleaved in pairs go
    through their layers in opposite directions, and an adaptive plan begins each layer with a tier of its own."""
    order = strategy.order
    if order.paired or order.copies > 1 or strategy.recompute == "adaptive":
        return None
    return 2 * (_reach(strategy) + 1) + 1


def _reach(strategy: Strategy) -> int:
    """How many layers from its own an instruction may lie: as far as parameters and values from the host come ahead of
    their use, which in the backward of a ring lies in the layer above already."""
    above = strategy.context_form == "ring" and strategy.offload in ("activations", "both")
    return strategy.prefetch + 1 + above


def shorter(graph: ModelGraph, strategy: Strategy) -> Shorter | None:
    """The model with at most so many alike layers in a row as are needed; None where that is all of them."""
    reach, most = _reach(strategy), written(strategy)
    if most is None:
        return None
    layers = [(index, layer) for index, layer in graph.chain if layer is not None]
    kept: list[int] = []
    stages: list[int] = []
    runs: list[Run] = []
    first = 0
    for count in strategy.stages:
        before = len(kept)
        kind: Callable[[int], object] = lambda n: (layers[n][0], strategy.tier(n), strategy.layer_on_host(n))  # noqa: E731
        for _, group in groupby(range(first, first + count), key=kind):
            same = list(group)
            if len(same) > most:
                runs.append(Run(len(kept) + most // 2, len(same) - most))
                same = same[: most // 2 + 1] + same[-(most // 2) :]
            kept += same
        stages.append(len(kept) - before)
        first += count
    if not runs:
        return None
    chain = [(layers[n][0], number) for number, n in enumerate(kept)]
    changed = strategy.but(
        stages=tuple(stages),
        tiers=tuple(strategy.tiers[n] for n in kept) if strategy.tiers else (),
        offloaded=tuple(number for number, n in enumerate(kept) if n in strategy.offloaded),
    )
    if strategy.offloaded and not changed.offloaded:
        return None
    whole = (graph.chain[0], *chain, graph.chain[-1])
    return Shorter(replace(graph, chain=whole), changed, tuple(runs), reach)
