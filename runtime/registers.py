"""Registers of one rank's unrolled program: names become slots, and their lives are followed while it is loaded.

The ledger is exact: it adds the plan's bytes of every register when it is written and takes them off when it is freed,
so the peak is known before the first step. Buffers have slots too; they live for ever and count nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from titan.compiler.plan.instruction import HOST, original, type_name
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


class Lives:
    """The registers of one program without choices: bytes of those that live, and their sum, instruction by
    instruction: the most during each (`curve`) and what is left after it (`after`)."""

    def __init__(self) -> None:
        self.live: dict[str, int] = {}
        self.begin: dict[str, int] = {}
        self.end: dict[str, int] = {}
        self.curve: list[int] = []
        self.after: list[int] = []
        self._bytes = 0
        self._peak = 0

    def check(self, name: str) -> None:
        if name not in self.live:
            verb = "after it was freed" if name in self.begin else "before it is written"
            raise ProgramError(f"{name} is read {verb}")

    def write(self, name: str, size: int) -> None:
        if name in self.begin:
            raise ProgramError(f"{name} is written a second time")
        self.begin[name] = len(self.after)
        self.live[name] = size
        self._bytes += size
        self._peak = max(self._peak, self._bytes)

    def free(self, name: str) -> None:
        self.check(name)
        self.end[name] = len(self.after)
        self._bytes -= self.live.pop(name)

    def empty(self, name: str) -> None:
        """The register lives on without its bytes."""
        self._bytes -= self.live[name]
        self.live[name] = 0

    @property
    def most(self) -> int:
        """The most bytes since the last mark."""
        return self._peak

    def mark(self) -> None:
        self.curve.append(self._peak)
        self.after.append(self._bytes)
        self._peak = self._bytes

    def lives_at(self, name: str, position: int) -> bool:
        """Whether a register holds a value just before an instruction."""
        return name in self.begin and self.begin[name] < position <= self.end.get(name, position)


class Registers:
    """Slots by name. While a program is loaded, `read`, `write` and `free` follow each register's life: in each of the
    `tiers` that a program leaves to the run, or in the one program that there is."""

    def __init__(self, plan: Plan, buffers: dict[str, Tensor], tiers: tuple[str, ...] = ("",)) -> None:
        self.slots: list[Any] = list(buffers.values())
        self.lives = {tier: Lives() for tier in tiers}
        self.on_host = Lives()  # bytes in host memory, in all tiers the same
        self._plan, self._sizes = plan, Sizes(plan)
        self._index = {name: number for number, name in enumerate(buffers)}
        self._buffers = frozenset(buffers)
        self._active = tuple(self.lives.values())

    @property
    def position(self) -> int:
        """Number of the instruction that is being loaded."""
        return len(self.curve)

    @property
    def curve(self) -> list[int]:
        """Most bytes of registers that live during each instruction; of a program with choices, in its first tier."""
        return next(iter(self.lives.values())).curve

    def enter(self, tiers: tuple[str, ...]) -> None:
        """The next instruction runs in some tiers only (none given: in all)."""
        self._active = tuple(self.lives[tier] for tier in tiers or self.lives)

    def is_buffer(self, name: str) -> bool:
        return name in self._buffers

    def buffer(self, name: str) -> int:
        if name not in self._buffers:
            raise ProgramError(f"the buffer {name} is not declared")
        return self._index[name]

    def read(self, name: str) -> int:
        """Slot of a live register or a buffer."""
        if name not in self._buffers:
            for lives in self._active:
                lives.check(name)
        return self._index[name]

    def write(self, name: str) -> int:
        """New slot for a register, which lives from here on."""
        if name in self._buffers:
            raise ProgramError(f"{name} is written a second time")
        size = self._size(name)
        for lives in self._active:
            lives.write(name, size)
        if name.startswith(HOST):
            self.on_host.write(name, self._sizes.host(name))
        if name not in self._index:  # else another tier has a slot for it
            self._index[name] = len(self.slots)
            self.slots.append(None)
        return self._index[name]

    def free(self, name: str) -> int:
        """Slot whose life ends."""
        if name in self._buffers:
            raise ProgramError(f"the buffer {name} is freed")
        for lives in self._active:
            lives.free(name)
        if name.startswith(HOST):
            self.on_host.free(name)
        return self._index[name]

    def settle(self, pending: str, value: str | None) -> tuple[int, int | None]:
        """A wait: the pending register ends and, if it has one, its value begins with the same bytes."""
        if value is not None:
            for lives in self._active:
                lives.check(pending)
                lives.empty(pending)
            if pending.startswith(HOST):
                self.on_host.empty(pending)
            target = self.write(value)
        else:
            target = None
        return self.free(pending), target

    def mark(self) -> None:
        """End of an instruction: one more point of the curve, the most bytes that were live during it."""
        for lives in self.lives.values():
            lives.mark()

    def finish(self) -> None:
        """End of the program: nothing may be left."""
        left = list(dict.fromkeys(name for lives in self.lives.values() for name in lives.live))
        if left:
            raise ProgramError(f"{len(left)} registers are never freed: {', '.join(left[:5])}")

    def types(self, name: str) -> tuple[TensorType, ...]:
        """Type of a register's value; a frame has several, a token none."""
        base = original(name).removeprefix("r.")
        kind, mark, unit = base.partition(".")
        if mark and kind in ("t", "u", "tier"):
            return ()
        if mark and kind in ("w", "dw"):
            bucket = self._plan.bucket_of(base)
            dtype = bucket.dtype if kind == "w" else gradient_dtype(bucket.dtype)
            return (TensorType(dtype, (bucket.elements,)),)
        if mark and kind == "state":
            bucket = self._plan.bucket_of(base)
            elements = bucket.state_copies * bucket.local("o", self._plan.shard_degree(bucket))
            return (TensorType(gradient_dtype(bucket.dtype), (elements,)),)
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

    def slot(self, name: str) -> int:
        """Slot of a register that some instruction before writes; 0, which is a buffer's, when none does."""
        return self._index.get(name, 0)

    def end(self, names: Iterable[str]) -> None:
        """Ends values while the program runs."""
        for name in names:
            self.slots[self._index[name]] = None

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
