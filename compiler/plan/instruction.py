"""One record for every instruction.

Operands are names. A register name may end in a micro-batch parameter of the block (`:i`, of the second half of a pair
`:j`, of the element that follows `:k` or `:l`) and in `?` (pending).
Names of buffers are declared in the plan's header (`p.l0` parameters, `g.l0` gradients, `o.l0` optimizer state,
`b.loss`). A register's copy in host memory is `host.x.l5:i`, what comes back of it is `back.x.l5:i`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.opcodes import OPCODES, Opcode
from titan.compiler.plan.operators import Attribute


@dataclass(frozen=True, slots=True)
class Instruction:
    """writes <- reads ^updates @group !stream {attributes}; `unit` names segment and layer of a compute instruction."""

    opcode: str
    writes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()
    unit: str = ""
    group: str = ""
    stream: str = ""
    attributes: tuple[tuple[str, Attribute], ...] = ()

    @property
    def row(self) -> Opcode:
        return OPCODES[self.opcode]

    def attribute(self, name: str, default: Attribute = "") -> Attribute:
        for key, value in self.attributes:
            if key == name:
                return value
        return default

    @property
    def when(self) -> tuple[str, ...]:
        """Tiers of the frame in which the instruction runs; empty: always."""
        if not self.attributes or self.attributes[-1][0] != "when":
            return ()
        return tuple(str(self.attributes[-1][1]).split("+"))

    @property
    def frame(self) -> str:
        """The register with the tier on which `when` depends."""
        return str(self.attributes[-2][1]) if self.when else ""

    def only(self, frame: str, tiers: Iterable[str]) -> Instruction:
        """The same instruction, run only when the register `frame` holds one of the tiers."""
        return replace(self, attributes=(*self.attributes, ("frame", frame), ("when", "+".join(tiers))))

    def always(self) -> Instruction:
        """The same instruction without its condition."""
        return replace(self, attributes=self.attributes[:-2]) if self.when else self


NAMES = 1 << 16  # names whose parts are remembered: the readers of a plan ask for the same ones over and over
WHOLE = ("w.", "dw.")  # prefixes of registers that hold a whole bucket: gathered parameters, gradients
STATE = "state."  # a register that holds the optimizer state of a bucket on the device while that is updated
HOST, BACK = "host.", "back."  # prefixes of a register's copy in host memory, and of the one that comes back
TO_HOST, FROM_HOST = "host.out", "host.in"  # streams of these copies, which run side by side


def _base_name(register: str) -> str:
    return register.rstrip("?").partition(":")[0]


@lru_cache(NAMES)
def base_name(register: str) -> str:
    """Register name without micro-batch and pending mark: `x.l5:i?` -> `x.l5`."""
    return _base_name(register)


def _original(name: str) -> str:
    return name.removeprefix(HOST).removeprefix(BACK)


@lru_cache(NAMES)
def original(register: str) -> str:
    """Base name of the register of which this is the copy on the host, or what came back: `back.x.l5:i` -> `x.l5`."""
    return _original(base_name(register))


@lru_cache(NAMES)
def type_name(register: str) -> str:
    """Key of the plan's types, base name without layer and mark: `d.x.l5:i?` -> `d.x`; `host.x.l5`, `r.x.l5` -> `x`.

    What belongs to a bucket (`w.l5:i` parameters, `dw.l5:i` gradients, `state.l5`) keeps its layer: each is as long as
    its bucket.
    """
    name = _original(_base_name(register)).removeprefix("r.")
    if name.startswith((*WHOLE, STATE)):
        return name
    head, mark, layer = name.rpartition(".l")
    return head if mark and layer.isdigit() else name


def unroll(name: str, arguments: dict[str, int]) -> str:
    """Concrete name in a call: `x.l5:i?` with i = 3 -> `x.l5:3?`."""
    if ":" not in name:
        return name
    base, _, parameter = name.partition(":")
    pending = "?" if parameter.endswith("?") else ""
    return f"{base}:{arguments[parameter.rstrip('?')]}{pending}"
