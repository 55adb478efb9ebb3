"""Backward is the transpose of forward: segments reversed, every conversion replaced by its dual.

Gradients of a value with several consumers are summed on the way: each further consumer's backward carries what is
there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import field

from titan.compiler.graph.model_graph import Convert, Part
from titan.compiler.passes.ring import Rotation, arrive, homeward, leading, pass_on, rotations
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.mesh import Mesh
from titan.compiler.plan.operators import Attribute
from titan.compiler.plan.segment import Segment

Namer = Callable[[str], str]


Buffers = Callable[[Iterable[str]], tuple[tuple[str, ...], tuple[str, ...]]]


def collective(
    opcode: str, result: str, source: str, step: Convert, source_dim: int | None, target_dim: int | None
) -> list[Instruction]:
    """A collective that converts `source` into `result`, and its wait."""
    attributes: dict[str, Attribute] = {}
    if opcode == "all_gather":
        attributes["dim"] = _known(source_dim)
    elif opcode == "reduce_scatter":
        attributes["dim"] = _known(target_dim)
    elif opcode == "all_to_all":
        attributes |= {"split": _known(target_dim), "concat": _known(source_dim)}
    else:
        attributes["op"] = step.reduction
    return [
        Instruction(opcode, (f"{result}?",), (source,), (), "", step.group, step.group, tuple(attributes.items())),
        Instruction("wait", (result,), (f"{result}?",)),
    ]


def again(rotation: Rotation, register: Namer) -> list[Instruction]:
    """Passes a value on that comes around a ring again in backward."""
    return pass_on(register(rotation.result), register(rotation.source), rotation.group, "back", -rotation.hops)


def _known(dim: int | None) -> int:
    assert dim is not None
    return dim


@dataclass
class Transpose:
    """Emits the backward of one part. `register` names a value's forward register, `gradient` its gradient register;
    `buffers` maps parameters of a segment to the (parameter, gradient) buffers that hold them."""

    part: Part
    register: Namer
    gradient: Callable[[str, int], str]  # (value, 0 for the final gradient or the number of the partial one)
    unit: Namer
    frame: Callable[[Segment], tuple[str, ...]]
    buffers: Buffers
    given: dict[str, str]  # gradients of the part's outputs, from whoever consumed them
    mesh: Mesh
    split: bool = False  # backward_input only; its weight frames (`weight_frame`) wait for backward_weight
    weight_frame: Namer = str
    current: dict[str, str] = field(default_factory=dict)
    remaining: dict[str, int] = field(default_factory=dict)
    number: dict[str, int] = field(default_factory=dict)
    emitted: list[Instruction] = field(default_factory=list)
    issued: dict[str, str] = field(default_factory=dict)  # shifted value -> its gradient on the way home
    awaited: dict[str, list[Instruction]] = field(default_factory=dict)  # register that comes around -> its waits

    def run(self) -> list[Instruction]:
        self.current = dict(self.given)
        differentiable = _differentiable(self.part)
        for step in self.part.steps:
            if isinstance(step, Segment):
                for name in step.inputs:
                    if name in step.differentiable:
                        self.remaining[name] = self.remaining.get(name, 0) + 1
            elif isinstance(step, Convert) and step.source in differentiable:
                self.remaining[step.source] = self.remaining.get(step.source, 0) + 1
        around, home = rotations(self.part), homeward(self.part)
        first = (self.register(rotation.result) for rotation in leading(self.part, self.mesh))
        self.awaited = {name: arrive(name) for name in first}
        for index, step in reversed(tuple(enumerate(self.part.steps))):
            for shift in home.get(index, ()):
                self._send_home(shift)
            for rotation in around.get(index, ()):
                self._rotate(rotation)
            if isinstance(step, Segment):
                self._segment(step)
            elif isinstance(step, Convert) and step.forward == "shift":
                self._come_home(step)
            elif isinstance(step, Convert) and step.source in differentiable:
                self._convert(step)
        return self.emitted

    def _rotate(self, rotation: Rotation) -> None:
        result, source = self.register(rotation.result), self.register(rotation.source)
        self.emitted += self.awaited.pop(source, [])
        self.emitted += again(rotation, self.register)
        self.awaited[result] = arrive(result)

    def _send_home(self, shift: Convert) -> None:
        """Issued before the block of the step computes; its own part of the gradient is added on arrival."""
        name = self.issued[shift.result] = self._partial(shift.source)
        self.emitted += pass_on(name, self.current[shift.result], shift.group, "back", -shift.hops)

    def _come_home(self, shift: Convert) -> None:
        name, total = self.issued[shift.result], self._name(shift.source)
        self.emitted += arrive(name)
        self.emitted.append(Instruction("add", (total,), (self.current[shift.source], name)))
        self.current[shift.source] = total

    def _name(self, value: str) -> str:
        """Register of the next contribution to a value's gradient; the last one has the plain name."""
        self.remaining[value] -= 1
        return self.gradient(value, 0) if self.remaining[value] == 0 else self._partial(value)

    def _partial(self, value: str) -> str:
        self.number[value] = self.number.get(value, 0) + 1
        return self.gradient(value, self.number[value])

    def _segment(self, step: Segment) -> None:
        if not any(v in step.differentiable for v in step.outputs):
            return  # statistics only
        for value in step.inputs:
            self.emitted += self.awaited.pop(self.register(value), [])
        reads = [self.current[step.final(v)] for v in step.outputs if v in step.differentiable]
        inputs = [v for v in step.inputs if v in step.differentiable]
        carried = [v for v in inputs if v in self.current]
        reads += [self.current[v] for v in carried]
        reads += [self.register(v) for v in (*step.kept_inputs, *step.kept_outputs)]
        reads += self.frame(step)
        parameters, gradients = self.buffers(step.backward_parameters)[0], self.buffers(step.parameters)[1]
        writes = names = tuple(self._name(v) for v in inputs)
        if self.split:
            gradients = self.buffers(f for f in step.parameters if f in step.early_parameters)[1]
            writes += (self.weight_frame(step.name),) if step.weight_frame else ()
        attributes: tuple[tuple[str, Attribute], ...] = (("carry", ",".join(carried)),) if carried else ()
        opcode = "backward_input" if self.split else "backward"
        unit = self.unit(step.name)
        self.emitted.append(Instruction(opcode, writes, (*reads, *parameters), gradients, unit, "", "", attributes))
        self.current.update(zip(inputs, names, strict=True))

    def _convert(self, step: Convert) -> None:
        source = self.current[step.result]
        before = self.current.get(step.source)
        if step.backward == "none":
            result = source
            self.remaining[step.source] -= 1
        else:
            result = self._name(step.source) if before is None else self._partial(step.source)
            self.emitted += collective(step.backward, result, source, step, step.target_dim, step.source_dim)
        if before is not None:
            total = self._name(step.source)
            self.emitted.append(Instruction("add", (total,), (before, result)))
            result = total
        self.current[step.source] = result


def _differentiable(part: Part) -> set[str]:
    """Values with a gradient: differentiable inputs and outputs of segments, and what conversions make of them."""
    found: set[str] = set()
    for step in part.steps:
        if isinstance(step, Segment):
            found.update(v for v in (*step.inputs, *step.outputs) if v in step.differentiable)
    for step in reversed(part.steps):
        if isinstance(step, Convert) and step.result in found and step.reduction != "max":
            found.add(step.source)
    return found
