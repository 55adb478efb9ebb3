"""Blocks of one chunk: its forward F, its backward B and its forward in an evaluation E, for any micro-batch `i`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from functools import cached_property, partial

from titan.compiler.graph.model_graph import Convert, ModelGraph, Part
from titan.compiler.passes.draft import Draft
from titan.compiler.passes.layouts import first_index, permutation
from titan.compiler.passes.liveness import outside_reads
from titan.compiler.passes.recompute import Layer, Tiers, alternatives
from titan.compiler.passes.ring import arrive, leading, pass_on, visited_last
from titan.compiler.passes.transpose import Transpose, again, collective
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.segment import TIERS, Segment, bind
from titan.compiler.strategy import Strategy

MICRO_BATCH = ":i"


@dataclass(frozen=True)
class Chunk:
    """Consecutive pieces of the chain held by one pipeline rank.

    `before` and `after` are the offsets of the neighbours' ranks on the pipeline axis (0: the same rank, None: no
    neighbour); `first` numbers the first layer, `last` one past the last.
    """

    number: int
    chain: tuple[tuple[int, int | None], ...]
    first: int
    last: int
    before: int | None
    after: int | None

    @property
    def entry(self) -> str:
        """Register that enters the chunk: the residual stream before its first layer."""
        return f"x.l{self.first}{MICRO_BATCH}"

    @property
    def exit(self) -> str:
        return f"x.l{self.last}{MICRO_BATCH}"


@dataclass(frozen=True)
class Names:
    """Register names of one part instance."""

    part: Part
    layer: int | None
    layers: int

    @cached_property
    def _registers(self) -> dict[str, str]:
        """Those that were asked for, by value."""
        return {"count": "count", "starts": f"starts{MICRO_BATCH}"}  # one for all layers of a chunk

    def register(self, value: str) -> str:
        found = self._registers.get(value)
        if found is None:
            found = self._registers[value] = "".join(self._split(value)) + MICRO_BATCH
        return found

    def gradient(self, value: str, number: int) -> str:
        mark = f".{number}" if number else ""
        base, layer = self._split(value)
        return f"d.{base}{mark}{layer}{MICRO_BATCH}"

    def piece(self, prefix: str, segment: str) -> str:
        """A piece of a segment's frame."""
        return f"{prefix}.{self.unit(segment)}{MICRO_BATCH}"

    @property
    def tier(self) -> str:
        """The register that holds the recompute tier of the layer."""
        return f"tier.l{self.layer}{MICRO_BATCH}"

    def weight_frame(self, segment: str) -> str:
        return f"wf.{self.unit(segment)}{MICRO_BATCH}"

    def unit(self, segment: str) -> str:
        return segment if self.layer is None else f"{segment}.l{self.layer}"

    def _split(self, value: str) -> tuple[str, str]:
        """Name and layer suffix; the residual stream is `x.lN` before layer N, whoever writes it."""
        if not self.part.repeated:
            if value in self.part.outputs and value != "loss":
                return "x", ".l0"
            return (value, f".l{self.layers}") if value == "x" else (value, "")
        if value in self.part.outputs:
            return "x", f".l{self.layer + 1}"  # type: ignore[operator]
        prefix = "" if self.part.name == "s" or value == "x" else f"{self.part.name[:-1]}."
        return prefix + value, f".l{self.layer}"


@dataclass(frozen=True)
class BlockWriter:
    """Writes the blocks of a role's chunks. `homes` maps parameters to their bucket."""

    graph: ModelGraph
    bucket_of: dict[str, str]
    layers: int
    strategy: Strategy
    tiers: dict[str, Tiers] = field(default_factory=dict)
    instances: dict[tuple[int, int | None], Names] = field(default_factory=dict)

    def names(self, index: int, layer: int | None) -> Names:
        """Names of a link of the chain."""
        found = self.instances.get((index, layer))
        if found is None:
            found = self.instances[index, layer] = Names(self.graph.parts[index], layer, self.layers)
        return found

    def training(self, chunk: Chunk, phases: frozenset[str]) -> tuple[Draft, ...]:
        """The drafts of the phases that a chunk's order uses: F; B or I and W, or both forms.

        What any of the backwards reads outlives F; everything else is freed at its last use.
        """
        backward = self._backward(chunk, split=False) if "B" in phases else []
        inputs = self._backward(chunk, split=True) if "I" in phases else []
        sent = {chunk.exit} if chunk.after is not None else set()
        returned = {f"d.{chunk.entry}"} if chunk.before is not None else set()
        forward = self._forward(chunk, keep=True)
        needed = outside_reads(backward) | outside_reads(inputs)
        varies = any(i.when for i in (*forward, *backward, *inputs))
        tiers = TIERS if varies else ()
        by_tier = tuple((t, frozenset(outside_reads(backward, t) | outside_reads(inputs, t))) for t in tiers)
        drafts = [_draft("F", chunk, forward, sent | (set() if varies else needed), by_tier)]
        if backward:
            drafts.append(_draft("B", chunk, backward, returned))
        if inputs:
            frames = {name for step in inputs for name in step.writes if name.startswith("wf.")}
            drafts.append(_draft("I", chunk, inputs, returned | frames))
            drafts.append(_draft("W", chunk, self._weights(chunk), set()))
        return tuple(drafts)

    def evaluate(self, chunk: Chunk) -> Draft:
        sent = {chunk.exit} if chunk.after is not None else set()
        return _draft("E", chunk, self._forward(chunk, keep=False), sent)

    def _forward(self, chunk: Chunk, keep: bool) -> list[Instruction]:
        emitted = _receive(chunk.entry, chunk.before)
        loaded: set[str] = set()
        for index, layer in chunk.chain:
            names = self.names(index, layer)
            part = names.part
            for value in part.values:
                if value.kind == "data" and value.shape and names.register(value.name) not in loaded:
                    loaded.add(names.register(value.name))
                    emitted.append(self._load(value.name, names, part))
            if keep and self._adaptive(part, layer):
                emitted.append(Instruction("watermark", (names.tier,), attributes=(("begin", self._tier(layer)),)))
            variants = {layer.tier: self._run(part, names, layer.tier) for layer in self._variants(part, names, keep)}
            emitted += alternatives(variants, names.tier)
            if "loss" in part.outputs:
                loss = names.register("loss")
                seed = (names.gradient("loss", 0),) if keep else ()
                emitted.append(Instruction("loss", seed, (loss,), ("b.loss",)))
        return emitted + _send(chunk.exit, chunk.after, "act")

    def _load(self, name: str, names: Names, part: Part) -> Instruction:
        value = part.table[name]
        mesh = self.graph.mesh
        where = (("start", first_index(value, 1, mesh)), ("length", value.local(mesh).shape[1]))
        what = "starts" if name.endswith("starts") else name
        attributes = (("what", what), ("micro_batch", "i"), *where, *permutation(self.graph.zigzag, value.shape[1]))
        return Instruction("load_batch", (names.register(name),), attributes=attributes)

    def _adaptive(self, part: Part, layer: int | None) -> bool:
        """Layers whose values go to the host keep the tier that they begin with: on its way nothing can be dropped."""
        adaptive = self.strategy.recompute == "adaptive" and part.repeated
        return adaptive and layer is not None and not self.strategy.layer_on_host(layer)

    def _tier(self, layer: int | None) -> str:
        return "none" if layer is None else self.strategy.tier(layer)

    def _variants(self, part: Part, names: Names, keep: bool = True) -> list[Layer]:
        """The tiers in which a part is lowered: one, or all of an adaptive plan."""
        tiers = TIERS if self._adaptive(part, names.layer) and keep else (self._tier(names.layer) if keep else "",)
        return [Layer(self._tiers(part), tier, names) for tier in tiers]

    def _tiers(self, part: Part) -> Tiers:
        found = self.tiers.get(part.name)
        if found is None:
            found = self.tiers[part.name] = Tiers(part, self.strategy.recompute == "adaptive")
        return found

    def _run(self, part: Part, names: Names, tier: str) -> list[Instruction]:
        """Segments and conversions in forward order; frames as the tier stores them, none without a tier."""
        emitted: list[Instruction] = []
        alias, awaited = self._tiers(part).alias, dict[str, list[Instruction]]()

        def name(value: str) -> str:
            return names.register(alias.get(value, value))

        for step in part.steps:
            read = step.inputs if isinstance(step, Segment) else (step.source,) if isinstance(step, Convert) else ()
            for value in read:
                emitted += awaited.pop(name(value), [])
            if isinstance(step, Convert):
                if step.forward == "shift":
                    emitted += pass_on(name(step.result), name(step.source), step.group, "next", step.hops)
                    awaited[name(step.result)] = arrive(name(step.result))
                elif step.forward != "none":
                    emitted += collective(
                        step.forward, name(step.result), name(step.source), step, step.source_dim, step.target_dim
                    )
            elif isinstance(step, Segment):
                frame = tuple(names.piece(piece, step.name) for piece in step.stored(tier)) if tier else ()
                reads = tuple(name(v) for v in step.inputs) + self._buffers(step.parameters, names=names)[0]
                writes = tuple(name(v) for v in step.outputs) + frame
                emitted.append(Instruction("forward", writes, reads, unit=names.unit(step.name)))
        return emitted

    def _buffers(self, formals: Iterable[str], *, names: Names) -> tuple[tuple[str, ...], tuple[str, ...]]:
        held = dict.fromkeys(self.bucket_of[bind(formal, names.layer)] for formal in formals)
        return tuple(f"p.{b}" for b in held), tuple(f"g.{b}" for b in held)

    def _weights(self, chunk: Chunk) -> list[Instruction]:
        """Weight gradients of a chunk in the order in which its backward left the weight frames."""
        emitted: list[Instruction] = []
        for index, layer in reversed(chunk.chain):
            names = self.names(index, layer)
            for step in reversed(self.graph.parts[index].steps):
                if isinstance(step, Segment) and step.weight_frame:
                    late = (f for f in step.parameters if f not in step.early_parameters)
                    updates = self._buffers(late, names=names)[1]
                    frame = names.weight_frame(step.name)
                    unit = names.unit(step.name)
                    emitted.append(Instruction("backward_weight", (), (frame,), updates, unit))
        return emitted

    def _backward(self, chunk: Chunk, split: bool) -> list[Instruction]:
        """The first rebuild stands before the wait for the gradient: it needs nothing of it. What comes around a ring
        again is issued under the ring's last block in the layer above."""
        emitted: list[Instruction] = []
        received = _receive(f"d.{chunk.exit}", chunk.after)
        above, begun = (
            "",
            0,
        )  # the unit of the layer above whose backward is a ring's last block; where that layer begins
        for index, layer in reversed(chunk.chain):
            names = self.names(index, layer)
            part = names.part
            variants = self._variants(part, names)
            buffers = partial(self._buffers, names=names)
            rebuild = alternatives({v.tier: v.rebuild(buffers) for v in variants}, names.tier)
            for rotation in leading(part, self.graph.mesh):
                _issue_early(again(rotation, variants[0].register), emitted, above, begun, rebuild)
            begun = len(emitted)
            emitted += rebuild + received
            emitted += alternatives({v.tier: self._transpose(v, split) for v in variants}, names.tier)
            above, received = names.unit(visited_last(part)), []
        return emitted + received + _send(f"d.{chunk.entry}", chunk.before, "grad")

    def _transpose(self, layer: Layer, split: bool) -> list[Instruction]:
        part, names = layer.tiers.part, layer.names
        given = {v: names.gradient(v, 0) for v in part.outputs}
        buffers = partial(self._buffers, names=names)
        return Transpose(
            part,
            layer.register,
            names.gradient,
            names.unit,
            layer.frame,
            buffers,
            given,
            self.graph.mesh,
            split,
            names.weight_frame,
        ).run()


def _draft(
    phase: str,
    chunk: Chunk,
    instructions: list[Instruction],
    outlive: set[str],
    by_tier: tuple[tuple[str, frozenset[str]], ...] = (),
) -> Draft:
    return Draft(f"{phase}.c{chunk.number}", tuple(instructions), frozenset(outlive), by_tier)


def _issue_early(
    issued: list[Instruction], emitted: list[Instruction], above: str, begun: int, rebuild: list[Instruction]
) -> None:
    """Puts an exchange where what it sends has been rebuilt, or before the backward of the unit `above`, which is found
    from `begun` on, or first."""
    source = issued[0].reads[0]
    made = next((n for n, i in enumerate(rebuild) if source in i.writes), None)
    if made is not None:
        rebuild[made + 1 : made + 1] = issued
    else:
        later = range(begun, len(emitted)) if above else range(0)
        place = next((n for n in later if emitted[n].unit == above and emitted[n].opcode != "recompute"), 0)
        emitted[place:place] = issued


def _receive(register: str, offset: int | None) -> list[Instruction]:
    return [Instruction("wait", (register,), (f"{register}?",))] if offset else []


def _send(register: str, offset: int | None, stream: str) -> list[Instruction]:
    if not offset:
        return []
    return [Instruction("send", (f"t.{register}?",), (register,), (), "", "pipeline", stream, (("peer", offset),))]
