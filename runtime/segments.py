"""A segment bound to a layer, its parameters and its rank: operator calls over numbered slots, no names at run time.

Every value of the body has a slot; values are dropped from their slot after the last use, and nothing is remembered
between calls. The gradient of a value with several readers is summed in the order of the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titan.compiler.plan.chains import chain_operands, chains
from titan.compiler.plan.mesh import Mesh, evaluate
from titan.compiler.plan.segment import Call, Segment, bind
from titan.runtime.dtypes import DTYPES
from titan.runtime.operator_table import functions
from titan.runtime.place import Attributes, Place
from titan.runtime.transposes import Given, Progress, Slots, Transpose, drop
from torch import Tensor

NOTHING: Given = {}


@dataclass(frozen=True, slots=True)
class _Forward:
    """A call, or a chain of calls that one kernel does: `ends` are the slots read for the last time."""

    function: Callable[..., tuple[Tensor, ...]]
    attributes: Attributes
    operands: tuple[int, ...]
    results: tuple[int, ...]
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Run:
    """Calls in order, the slots of what they are given (values, pieces of the frame) and of what they make."""

    given: tuple[int, ...]
    pieces: tuple[tuple[int, ...], ...]
    steps: tuple[_Forward, ...]
    made: tuple[int, ...]


class BoundSegment:
    """`segment` of `layer` on the rank at `coordinates`.

    `parameters` and `gradients` map full parameter names to views of the flat buffers: parameters in the plan's dtype,
    gradients in float32 (float64 in a float64 run). Those of sharded buckets are not there: they come with each call,
    by the segment's names, as `held` and `into`.
    """

    def __init__(
        self,
        segment: Segment,
        layer: int | None,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        mesh: Mesh,
        coordinates: dict[str, int],
        chained: bool = True,
    ) -> None:
        """`chained`: calls that one kernel can do together are done so."""
        self.segment, self.layer, self._chained = segment, layer, chained
        self._slot = {name: number for number, name in enumerate(segment.types)}
        self._blank: Slots = [None] * len(self._slot)
        for formal in segment.parameters:
            self._blank[self._slot[formal]] = parameters.get(bind(formal, layer))
        self._weights = {f: gradients.get(bind(f, layer)) for f in segment.parameters}
        attributes = [{k: evaluate(v, mesh, coordinates) for k, v in call.attributes} for call in segment.body]
        self._inputs, self._outputs = self._slots(segment.inputs), self._slots(segment.outputs)
        self._frame = self._slots(segment.frame)
        self._kept_inputs, self._kept_outputs = self._slots(segment.kept_inputs), self._slots(segment.kept_outputs)
        wanted = segment.differentiable
        self._output_gradients = self._slots(tuple(segment.final(v) for v in segment.outputs if v in wanted))
        self._input_gradients = tuple((v, self._slot[v]) for v in segment.inputs if v in wanted)
        self._weight_frame = tuple((n.startswith("d."), self._slot[n.removeprefix("d.")]) for n in segment.weight_frame)
        self._attributes = attributes
        self._runs: dict[tuple[str, ...], _Run] = {}
        self._interrupted: Progress | None = None
        self._backward = self._backward_steps(attributes)

    def forward(
        self, inputs: Sequence[Tensor], place: Place, keep: bool | tuple[str, ...], held: Given = NOTHING
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """(outputs, frame) in the segment's order; `keep`: the pieces of the frame that are kept, all or none."""
        pieces = (tuple(self.segment.pieces) if keep else ()) if isinstance(keep, bool) else keep
        made = self.run(self.forward_run(pieces), inputs, (), place, held)
        count = len(self._outputs)
        return made[:count], made[count:]

    def run(
        self, run: _Run, given: Sequence[Tensor], pieces: Sequence[Sequence[Tensor]], place: Place, held: Given
    ) -> tuple[Tensor, ...]:
        """The values that a run makes, from values and stored pieces of the frame."""
        place, values = place.at(self.layer), self._values(held)
        _fill(values, run.given, given)
        for slots, piece in zip(run.pieces, pieces, strict=True):
            _fill(values, slots, piece)
        for step in run.steps:
            results = step.function(step.attributes, place, *[values[slot] for slot in step.operands])
            _fill(values, step.results, results)
            drop(values, step.ends)
        return tuple(values[slot] for slot in run.made)

    def forward_run(self, pieces: tuple[str, ...]) -> _Run:
        """The whole body from the inputs; makes outputs and kept pieces."""
        if pieces not in self._runs:
            segment = self.segment
            made = (*segment.outputs, *(v for piece in pieces for v in segment.pieces[piece]))
            self._runs[pieces] = _Run(self._inputs, (), self._steps(segment.body, made), self._slots(made))
        return self._runs[pieces]

    def rebuild_run(self, tier: str) -> _Run:
        """What a tier runs again, from what it stores; makes outputs and missing pieces."""
        key = ("rebuild", tier)
        if key not in self._runs:
            segment, again = self.segment, self.segment.rebuild(tier)
            assert again is not None
            stored = segment.stored(tier)
            missing = (v for piece, values in segment.pieces.items() if piece not in stored for v in values)
            made = (*again.writes, *missing)
            pieces = tuple(self._slots(segment.pieces[piece]) for piece in stored)
            steps = self._steps(segment.rebuild_body(tier), made)
            self._runs[key] = _Run(self._slots(again.reads), pieces, steps, self._slots(made))
        return self._runs[key]

    def backward(
        self,
        gradients: Sequence[Tensor],
        carried: Mapping[str, Tensor],
        kept_inputs: Sequence[Tensor],
        kept_outputs: Sequence[Tensor],
        frame: Sequence[Tensor],
        place: Place,
        held: Given = NOTHING,
        into: Given = NOTHING,
    ) -> tuple[Tensor, ...]:
        """Gradients of the differentiable inputs in order; adds those of the parameters into their views.

        `gradients` are those of the differentiable outputs in order; `carried` maps inputs to partial gradients from
        other readers, which are added to the result. When an allocation fails in the middle, the next call goes on from
        there: no gradient is added twice.
        """
        state = self._interrupted = self._interrupted or self._restored(
            gradients, kept_inputs, kept_outputs, frame, held
        )
        place = place.at(self.layer)
        for step in self._backward[state.done :]:
            given = step.given(state.d)
            step.inputs(state, given, place, into)
            step.weights(state.values, given, place, into)
            drop(state.d, step.ends)
            state.next()
        results = self._results(state.d, carried)
        self._interrupted = None
        return results

    def backward_input(
        self,
        gradients: Sequence[Tensor],
        carried: Mapping[str, Tensor],
        kept_inputs: Sequence[Tensor],
        kept_outputs: Sequence[Tensor],
        frame: Sequence[Tensor],
        place: Place,
        held: Given = NOTHING,
        into: Given = NOTHING,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """(gradients of the differentiable inputs, weight frame); cheap parameters get their gradient here."""
        state = self._interrupted = self._interrupted or self._restored(
            gradients, kept_inputs, kept_outputs, frame, held
        )
        place = place.at(self.layer)
        for step in self._backward[state.done :]:
            step.inputs(state, step.given(state.d), place, into)
            drop(state.d, step.unkept)
            state.next()
        results = self._results(state.d, carried)
        self._interrupted = None
        return results, tuple(
            (state.d if of_gradient else state.values)[slot] for of_gradient, slot in self._weight_frame
        )

    def backward_weight(self, weight_frame: Sequence[Tensor], place: Place, into: Given = NOTHING) -> None:
        """Adds the gradients that `backward_input` left out, from the frame that it gave."""
        state = self._interrupted = self._interrupted or Progress(self._blank.copy(), [None] * len(self._blank))
        values, d = state.values, state.d
        place = place.at(self.layer)
        for (of_gradient, slot), tensor in zip(self._weight_frame, weight_frame, strict=True):
            (d if of_gradient else values)[slot] = tensor
        for step in self._backward[state.done :]:
            if step.late:
                step.weights(values, step.given(d), place, into)
            state.next()
        self._interrupted = None

    def _slots(self, names: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(self._slot[name] for name in names)

    def _values(self, held: Given) -> Slots:
        """Slots with the parameters alone."""
        values = self._blank.copy()
        for formal, tensor in held.items():
            values[self._slot[formal]] = tensor
        return values

    def _restored(
        self,
        gradients: Sequence[Tensor],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        frame: Sequence[Tensor],
        held: Given,
    ) -> Progress:
        values = self._values(held)
        _fill(values, self._kept_inputs, inputs)
        _fill(values, self._kept_outputs, outputs)
        _fill(values, self._frame, frame)
        d: Slots = [None] * len(values)
        _fill(d, self._output_gradients, gradients)
        return Progress(values, d)

    def _results(self, d: Slots, carried: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return tuple(d[slot] + carried[name] if name in carried else d[slot] for name, slot in self._input_gradients)

    def _steps(self, body: tuple[Call, ...], made: tuple[str, ...]) -> tuple[_Forward, ...]:
        """Calls of the body; what they leave is dropped after its last use, but for what the run is to make."""
        stays = frozenset((*made, *self.segment.parameters))
        found = chains(body, frozenset(made)) if self._chained else tuple((call,) for call in body)
        last = {operand: number for number, chain in enumerate(found) for operand in chain_operands(chain)}
        last = {r: number for number, chain in enumerate(found) for r in chain[-1].results} | last
        attributes, steps = dict(zip(self.segment.body, self._attributes, strict=True)), []
        for number, chain in enumerate(found):
            operands, results = chain_operands(chain), chain[-1].results
            ends = [v for v in dict.fromkeys(operands + results) if last[v] == number and v not in stays]
            function = functions(chain[0].operator).forward
            slots = (self._slots(names) for names in (operands, results, tuple(ends)))
            steps.append(_Forward(function, attributes[chain[0]], *slots))
        return tuple(steps)

    def _backward_steps(self, attributes: list[dict[str, Any]]) -> tuple[Transpose, ...]:
        """Calls in reverse that lie between a given output gradient and something that wants one."""
        segment = self.segment
        reached = {v for v in segment.outputs if v in segment.differentiable}
        steps = []
        for call, evaluated in zip(reversed(segment.body), reversed(attributes), strict=True):
            if not call.row.differentiable or not reached.intersection(call.results):
                continue
            step = self._backward_step(call, evaluated)
            reached.update(o for o in call.operands if self._slot[o] in step.targets)
            if step.input is not None or step.weight is not None or step.both is not None:
                steps.append(step)
        return tuple(steps)

    def _backward_step(self, call: Call, attributes: Attributes) -> Transpose:
        row, module = call.row, functions(call.operator)
        results = tuple(self.segment.final(r) for r in call.results)
        slots = dict(zip(row.operands + row.results, self._slots(call.operands + results), strict=True))
        operands = list(zip(row.operands, call.operands, strict=True))
        inputs = {name: o for name, o in operands if name not in row.data and name not in row.parameters}
        targets = tuple(self._slot[o] if o in self.segment.differentiable else None for o in inputs.values())
        wanted = any(target is not None for target in targets)
        twice = len(set(inputs.values())) < len(inputs)  # one value is read twice by the call
        own = tuple(name not in row.hands_on and not twice for name in inputs)
        weights = tuple(o for name, o in operands if name in row.parameters)
        both = getattr(module, "backward", None) if row.weight_with_input else None
        saved_weight = row.saves if row.weight_with_input else row.saves_weight
        main = results[: len(row.main_results)]
        types = [self.segment.types[result] for result in main]
        return Transpose(
            attributes,
            tuple((self._slot[r], DTYPES[t.dtype], t.shape) for r, t in zip(main, types, strict=True)),
            tuple((name, slots[name]) for name in row.saves),
            tuple((name, slots[name]) for name in saved_weight),
            targets,
            own,
            weights,
            tuple(self._weights[o] for o in weights),
            module.backward_input if wanted else None,
            module.backward_weight if weights else None,
            both if wanted and weights else None,
            getattr(module, "backward_onto", None) if wanted and self._chained else None,
            bool(weights) and not row.weight_with_input,
            self._slots(main),
            self._slots(tuple(r for r in main if f"d.{r}" not in self.segment.weight_frame)),
        )


def _fill(values: Slots, slots: tuple[int, ...], tensors: Sequence[Tensor]) -> None:
    for slot, tensor in zip(slots, tensors, strict=True):
        values[slot] = tensor
