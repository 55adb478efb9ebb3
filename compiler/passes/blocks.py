"""Blocks of one chunk: its forward F, its backward B and its forward in an evaluation E, for any micro-batch `i`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from titan.compiler.graph.model_graph import Convert, ModelGraph, Part
from titan.compiler.passes.liveness import liveness, outside_reads
from titan.compiler.passes.transpose import Transpose, collective
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.program import Block
from titan.compiler.plan.segment import Segment, bind

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

    def register(self, value: str) -> str:
        return "count" if value == "count" else self._name(value) + MICRO_BATCH

    def gradient(self, value: str, number: int) -> str:
        mark = f".{number}" if number else ""
        base, layer = self._split(value)
        return f"d.{base}{mark}{layer}{MICRO_BATCH}"

    def frame(self, segment: str) -> str:
        return f"f.{self.unit(segment)}{MICRO_BATCH}"

    def weight_frame(self, segment: str) -> str:
        return f"wf.{self.unit(segment)}{MICRO_BATCH}"

    def unit(self, segment: str) -> str:
        return segment if self.layer is None else f"{segment}.l{self.layer}"

    def _name(self, value: str) -> str:
        return "".join(self._split(value))

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
    recompute: str

    def training(self, chunk: Chunk, phases: frozenset[str]) -> tuple[Block, ...]:
        """The blocks of the phases that a chunk's order uses: F; B or I and W, or both forms.

        What any of the backwards reads outlives F; everything else is freed at its last use.
        """
        backward = self._backward(chunk, split=False) if "B" in phases else []
        inputs = self._backward(chunk, split=True) if "I" in phases else []
        sent = {chunk.exit} if chunk.after is not None else set()
        returned = {f"d.{chunk.entry}"} if chunk.before is not None else set()
        needed = outside_reads(backward) | outside_reads(inputs)
        blocks = [Block(f"F.c{chunk.number}", ("i",), liveness(self._forward(chunk, keep=True), needed | sent))]
        if backward:
            blocks.append(Block(f"B.c{chunk.number}", ("i",), liveness(backward, returned)))
        if inputs:
            frames = {name for step in inputs for name in step.writes if name.startswith("wf.")}
            blocks.append(Block(f"I.c{chunk.number}", ("i",), liveness(inputs, returned | frames)))
            blocks.append(Block(f"W.c{chunk.number}", ("i",), liveness(self._weights(chunk), set())))
        return tuple(blocks)

    def evaluate(self, chunk: Chunk) -> Block:
        sent = {chunk.exit} if chunk.after is not None else set()
        return Block(f"E.c{chunk.number}", ("i",), liveness(self._forward(chunk, keep=False), sent))

    def _forward(self, chunk: Chunk, keep: bool) -> list[Instruction]:
        emitted = _receive(chunk.entry, chunk.before)
        for index, layer in chunk.chain:
            part = self.graph.parts[index]
            names = Names(part, layer, self.layers)
            emitted += [
                self._load(value.name, names, part) for value in part.values if value.kind == "data" and value.shape
            ]
            kept = keep and not self._recomputed(part)
            emitted += self._run("forward", part, names, names.register, kept)
            if "loss" in part.outputs:
                loss = names.register("loss")
                seed = (names.gradient("loss", 0),) if keep else ()
                emitted.append(Instruction("loss", seed, (loss,), ("b.loss",)))
        return emitted + _send(chunk.exit, chunk.after, "act")

    def _load(self, name: str, names: Names, part: Part) -> Instruction:
        value = part.table[name]
        mesh = self.graph.mesh
        length = value.local(mesh).shape[1]
        held = [f for f, s in value.layout if s == "V1"]
        start: str | int = f"@{held[0]}*{length}" if held else 0
        attributes = (("what", name), ("micro_batch", "i"), ("start", start), ("length", length))
        return Instruction("load_batch", (names.register(name),), attributes=attributes)

    def _recomputed(self, part: Part) -> bool:
        return self.recompute == "full" and part.repeated

    def _run(
        self, opcode: str, part: Part, names: Names, register: Callable[[str], str], keep: bool
    ) -> list[Instruction]:
        """Segments and conversions in forward order; `register` names the values."""
        emitted: list[Instruction] = []
        alias: dict[str, str] = {}

        def name(value: str) -> str:
            return register(alias.get(value, value))

        for step in part.steps:
            if isinstance(step, Convert):
                if step.forward == "none":
                    alias[step.result] = alias.get(step.source, step.source)
                else:
                    emitted += collective(
                        step.forward, name(step.result), name(step.source), step, step.source_dim, step.target_dim
                    )
            elif isinstance(step, Segment):
                frame = (names.frame(step.name),) if step.frame and keep else ()
                reads = tuple(name(v) for v in step.inputs) + self._buffers(step, names=names)[0]
                writes = tuple(name(v) for v in step.outputs) + frame
                emitted.append(Instruction(opcode, writes, reads, unit=names.unit(step.name)))
        return emitted

    def _buffers(
        self, step: Segment, early: bool | None = None, *, names: Names
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        formals = step.parameters
        if early is not None:
            formals = tuple(f for f in formals if (f in step.early_parameters) == early)
        held = dict.fromkeys(self.bucket_of[bind(formal, names.layer)] for formal in formals)
        return tuple(f"p.{b}" for b in held), tuple(f"g.{b}" for b in held)

    def _weights(self, chunk: Chunk) -> list[Instruction]:
        """Weight gradients of a chunk in the order in which its backward left the weight frames."""
        emitted: list[Instruction] = []
        for index, layer in reversed(chunk.chain):
            names = Names(self.graph.parts[index], layer, self.layers)
            for step in reversed(self.graph.parts[index].steps):
                if isinstance(step, Segment) and step.weight_frame:
                    updates = self._buffers(step, early=False, names=names)[1]
                    frame = names.weight_frame(step.name)
                    unit = names.unit(step.name)
                    emitted.append(Instruction("backward_weight", (), (frame,), updates, unit))
        return emitted

    def _backward(self, chunk: Chunk, split: bool) -> list[Instruction]:
        emitted = _receive(f"d.{chunk.exit}", chunk.after)
        for index, layer in reversed(chunk.chain):
            part = self.graph.parts[index]
            names = Names(part, layer, self.layers)
            register = _aliased(part, names.register)
            if self._recomputed(part):
                emitted += self._rebuild(part, names)
                register = _aliased(part, _rebuilt(part, names))
            given = {v: names.gradient(v, 0) for v in part.outputs}
            buffers = partial(self._buffers, names=names)
            emitted += Transpose(
                part, register, names.gradient, names.unit, names.frame, buffers, given, split, names.weight_frame
            ).run()
        return emitted + _send(f"d.{chunk.entry}", chunk.before, "grad")

    def _rebuild(self, part: Part, names: Names) -> list[Instruction]:
        """The forward again, as far as the backward needs it: from the layer's input, into `r.` registers."""
        needed = {v for step in part.steps if isinstance(step, Segment) for v in step.kept}
        steps: list[Convert | Segment] = []
        for step in reversed(part.steps):
            if isinstance(step, Segment) and (step.frame or needed & set(step.outputs)):
                needed.update(step.inputs)
                steps.append(step)
            elif isinstance(step, Convert) and step.result in needed:
                needed.add(step.source)
                steps.append(step)
        trimmed = Part(part.name, True, part.inputs, part.outputs, part.values, tuple(reversed(steps)))
        return self._run("recompute", trimmed, names, _rebuilt(part, names), True)


def _rebuilt(part: Part, names: Names) -> Callable[[str], str]:
    def register(value: str) -> str:
        return names.register(value) if value in part.inputs else f"r.{names.register(value)}"

    return register


def _aliased(part: Part, register: Callable[[str], str]) -> Callable[[str], str]:
    """Values that a conversion leaves as they are have the register of their source."""
    alias: dict[str, str] = {}
    for step in part.steps:
        if isinstance(step, Convert) and step.forward == "none":
            alias[step.result] = alias.get(step.source, step.source)
    return lambda value: register(alias.get(value, value))


def _receive(register: str, offset: int | None) -> list[Instruction]:
    return [Instruction("wait", (register,), (f"{register}?",))] if offset else []


def _send(register: str, offset: int | None, stream: str) -> list[Instruction]:
    if not offset:
        return []
    return [Instruction("send", (f"t.{register}?",), (register,), (), "", "pipeline", stream, (("peer", offset),))]
