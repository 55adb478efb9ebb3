"""Registers of one rank's unrolled program: names become slots, and their lives are followed while it is loaded.

The ledger is exact: it adds the plan's bytes of every register when it is written and takes them off when it is freed,
so the peak is known before the first step. Buffers have slots too; they live for ever and count nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from titan.compiler.plan.instruction import base_name, type_name
from titan.compiler.plan.operators import TensorType
from titan.compiler.plan.program import Plan
from titan.compiler.plan.segment import parse_unit
from titan.compiler.plan.sizes import Sizes, gradient_dtype
from titan.grammar.diagnostics import Diagnostic, TitanError
from titan.runtime.dtypes import DTYPES
from torch import Tensor


class ProgramError(TitanError):
    """A program that breaks the rules of registers: written twice, read before written or after freed, never freed."""

    def __init__(self, message: str) -> None:
        super().__init__(Diagnostic("T610", message), exit_code=1)


class Registers:
    """Slots by name. While a program is loaded, `read`, `write` and `free` follow each register's life."""

    def __init__(self, plan: Plan, buffers: dict[str, Tensor]) -> None:
        self.slots: list[Any] = list(buffers.values())
        self.curve: list[int] = []
        self._plan, self._sizes = plan, Sizes(plan)
        self._index = {name: number for number, name in enumerate(buffers)}
        self._buffers = frozenset(buffers)
        self._live: dict[str, int] = {}
        self._bytes = 0
        self._peak = 0

    def is_buffer(self, name: str) -> bool:
        return name in self._buffers

    def buffer(self, name: str) -> int:
        if name not in self._buffers:
            raise ProgramError(f"the buffer {name} is not declared")
        return self._index[name]

    def read(self, name: str) -> int:
        """Slot of a live register or a buffer."""
        if name not in self._buffers and name not in self._live:
            verb = "after it was freed" if name in self._index else "before it is written"
            raise ProgramError(f"{name} is read {verb}")
        return self._index[name]

    def write(self, name: str) -> int:
        """New slot for a register, which lives from here on."""
        if name in self._index:
            raise ProgramError(f"{name} is written a second time")
        self._index[name] = len(self.slots)
        self.slots.append(None)
        self._live[name] = size = self._size(name)
        self._bytes += size
        self._peak = max(self._peak, self._bytes)
        return self._index[name]

    def free(self, name: str) -> int:
        """Slot whose life ends."""
        slot = self.read(name)
        if name in self._buffers:
            raise ProgramError(f"the buffer {name} is freed")
        self._bytes -= self._live.pop(name)
        return slot

    def settle(self, pending: str, value: str | None) -> tuple[int, int | None]:
        """A wait: the pending register ends and, if it has one, its value begins with the same bytes."""
        if pending in self._live and value is not None:
            self._bytes -= self._live.pop(pending)
            self._live[pending] = 0
            target = self.write(value)
        else:
            target = None
        return self.free(pending), target

    def mark(self) -> None:
        """End of an instruction: one more point of the curve, the most bytes that were live during it."""
        self.curve.append(self._peak)
        self._peak = self._bytes

    def finish(self) -> None:
        """End of the program: nothing may be left."""
        left = list(self._live)
        if left:
            raise ProgramError(f"{len(left)} registers are never freed: {', '.join(left[:5])}")

    def types(self, name: str) -> tuple[TensorType, ...]:
        """Type of a register's value; a frame has several, a token none."""
        base = base_name(name).removeprefix("r.")
        kind, mark, unit = base.partition(".")
        if mark and kind in ("t", "u", "tier"):
            return ()
        if mark and kind in ("w", "dw"):
            bucket = self._plan.bucket_of(base)
            dtype = bucket.dtype if kind == "w" else gradient_dtype(bucket.dtype)
            return (TensorType(dtype, (bucket.elements,)),)
        if mark and kind in ("f", "fs", "fn", "wf"):
            segment = self._plan.segment_table[parse_unit(unit)[0]]
            names = segment.weight_frame if kind == "wf" else segment.pieces[kind]
            return tuple(segment.types[n.removeprefix("d.")] for n in names)
        found = self._plan.types.get(type_name(name))
        if found is None:
            raise ProgramError(f"{name} has no type")
        return (found,)

    def _size(self, name: str) -> int:
        try:
            return self._sizes.register(name)
        except KeyError:
            raise ProgramError(f"{name} has no type") from None

    def checker(self, name: str) -> Callable[[], None]:
        """A check that the slot holds exactly what the plan says; raises ProgramError with both."""
        slot, wanted, slots = self._index[name], [(t.shape, DTYPES[t.dtype]) for t in self.types(name)], self.slots

        def check() -> None:
            value = slots[slot]
            found = [(tuple(t.shape), t.dtype) for t in (value if isinstance(value, tuple) else (value,))]
            if found != wanted:
                raise ProgramError(f"{name} is {_describe(found)}, the plan says {_describe(wanted)}")

        return check


def reader(slots: list[Any], indices: Sequence[int]) -> Callable[[], tuple[Any, ...]]:
    """The values of some slots, as a tuple."""
    chosen = tuple(indices)
    if len(chosen) == 1:
        (only,) = chosen
        return lambda: (slots[only],)
    return lambda: tuple([slots[k] for k in chosen])


def writer(slots: list[Any], indices: Sequence[int]) -> Callable[[Sequence[Any]], None]:
    """Puts values into slots; as many as there are slots."""
    chosen = tuple(indices)
    if len(chosen) == 1:
        (only,) = chosen

        def put_one(values: Sequence[Any]) -> None:
            (slots[only],) = values

        return put_one

    def put(values: Sequence[Any]) -> None:
        for k, value in zip(chosen, values, strict=True):
            slots[k] = value

    return put


def _describe(values: list[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in values) or "nothing"
