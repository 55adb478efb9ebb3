"""Transposes of the calls of a segment: the steps of its backward, and how far a backward has come."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from titan.runtime.place import Attributes, Place
from torch import Tensor

Slots = list[Any]  # Tensor or None
Names = tuple[tuple[str, int], ...]
Given = Mapping[str, Tensor]  # by the segment's name of a parameter


@dataclass(slots=True)
class Progress:
    """How far a backward has come: values and gradients by slot, calls that are done, and of the next one the input
    gradients that it has given (its cheap weights with them), and whether they are added."""

    values: Slots
    d: Slots
    done: int = 0
    found: tuple[Tensor, ...] | None = None
    added: bool = False

    def next(self) -> None:
        self.done, self.found, self.added = self.done + 1, None, False


@dataclass(frozen=True, slots=True)
class Transpose:
    """Transpose of one call.

    `gradients` are (slot, dtype, shape) of the main results; `saved` the values for the input gradients, `saved_weight`
    those for the weights; `targets` the slots that receive an input gradient, None where nobody wants it, and `own`
    whether what the operator gives for each is a tensor that nobody else holds; `parameters` are those that get a
    gradient and `kept` where it is added (None: given with each call). `both` does input and weight gradients at once;
    `onto` the input gradient and its sum with what other readers gave;
    `weight` is None for calls without parameters, and `late` says that it runs after the input gradients. `ends` are
    the gradients read for the last time, `unkept` those of them that no weight frame hands on.
    """

    attributes: Attributes
    gradients: tuple[tuple[int, torch.dtype, tuple[int, ...]], ...]
    saved: Names
    saved_weight: Names
    targets: tuple[int | None, ...]
    own: tuple[bool, ...]
    parameters: tuple[str, ...]
    kept: tuple[Tensor | None, ...]
    input: Callable[..., tuple[Tensor, ...]] | None
    weight: Callable[..., None] | None
    both: Callable[..., tuple[Tensor, ...]] | None
    onto: Callable[..., Tensor] | None
    late: bool
    ends: tuple[int, ...]
    unkept: tuple[int, ...]

    def given(self, d: Slots) -> tuple[Tensor, ...]:
        """Gradients of the call's results; zero for a result that no loss depends on."""
        if len(self.gradients) == 1:  # there is one, or the call would not be a step
            return (d[self.gradients[0][0]],)
        device = next(d[slot].device for slot, _, _ in self.gradients if d[slot] is not None)
        return tuple(
            torch.zeros(shape, dtype=dtype, device=device) if d[slot] is None else d[slot]
            for slot, dtype, shape in self.gradients
        )

    def inputs(self, state: Progress, given: tuple[Tensor, ...], place: Place, into: Given) -> None:
        """Input gradients, added to what other readers gave; weights too for cheap parameters."""
        if state.found is None:
            target = self.targets[0] if self.targets else None
            before = None if self.onto is None or target is None else state.d[target]
            if self.onto is not None and target is not None and before is not None:
                saved = {name: state.values[slot] for name, slot in self.saved}
                state.d[target] = self.onto(self.attributes, place, saved, given, before)
                state.found, state.added = (), True
            else:
                state.found = self._found(state.values, given, place, into)
        if not state.added:
            self._add(state.found, state.d)
            state.added = True

    def weights(self, values: Slots, given: tuple[Tensor, ...], place: Place, into: Given) -> None:
        """Adds the gradients of parameters that are not cheap."""
        if self.late and self.weight is not None:
            saved = {name: values[slot] for name, slot in self.saved_weight}
            self.weight(self.attributes, place, saved, given, self._into(into))

    def _found(self, values: Slots, given: tuple[Tensor, ...], place: Place, into: Given) -> tuple[Tensor, ...]:
        saved = {name: values[slot] for name, slot in self.saved}
        if self.both is not None:
            return self.both(self.attributes, place, saved, given, self._into(into))
        found: tuple[Tensor, ...] = ()
        if self.input is not None:
            found = self.input(self.attributes, place, saved, given)
        if self.weight is not None and not self.late:
            self.weight(self.attributes, place, saved, given, self._into(into))
        return found

    def _add(self, found: tuple[Tensor, ...], d: Slots) -> None:
        """Sums are made in place where the call gave a tensor of its own. What may run out of memory comes first, so
        that it can be done again."""
        if len(found) == 1 and (target := self.targets[0]) is not None:
            before, (gradient,) = d[target], found
            d[target] = gradient if before is None else gradient.add_(before) if self.own[0] else before + gradient
            return
        sums: dict[int, Tensor] = {}
        for target, gradient, own in zip(self.targets, found, self.own):
            if target is not None:
                before = sums.get(target, d[target])
                sums[target] = gradient if own or before is None else before + gradient
        for target, own in zip(self.targets, self.own):
            if own and target is not None and d[target] is not None:
                sums[target].add_(d[target])
        for target, total in sums.items():
            d[target] = total

    def _into(self, given: Given) -> tuple[Tensor, ...]:
        """Where the gradients of the parameters are added."""
        if not given:
            return self.kept  # type: ignore[return-value]
        return tuple(given[name] if held is None else held for name, held in zip(self.parameters, self.kept))


def drop(values: Slots, slots: tuple[int, ...]) -> None:
    for slot in slots:
        values[slot] = None
