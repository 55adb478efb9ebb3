"""Liveness: ends the life of every register of a block right after its last use, unless it must outlive the block."""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import lru_cache

from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.segment import TIERS


def liveness(
    instructions: list[Instruction], outlive: Set[str], by_tier: Mapping[str, Set[str]] | None = None
) -> tuple[Instruction, ...]:
    """Inserts `free` instructions. Registers without a micro-batch belong to the step, not to the block.

    What an asynchronous instruction reads is borrowed until its wait, so its last use is that wait. Where instructions
    depend on recompute tiers, lives are found for each tier alone; `by_tier` are registers that outlive the block too.
    """
    frames = dict.fromkeys(i.frame for i in instructions if i.when)
    if not frames and not by_tier:
        ends = {p: [_free(names)] for p, names in _ends(instructions, outlive).items()}
    else:
        lives = {t: _ends(running(instructions, t), outlive | (by_tier or {}).get(t, set())) for t in TIERS}
        ends = _by_tier(instructions, {t: _places(instructions, t, found) for t, found in lives.items()})
    result: list[Instruction] = []
    for position, instruction in enumerate(instructions):
        result += [instruction, *ends.get(position, ())]
    if not frames:
        return tuple(result)
    return _end_tiers(result, frames, outlive | set().union(*(by_tier or {}).values()))


@lru_cache(1 << 12)  # variants of a block end mostly the same registers
def _free(names: tuple[str, ...]) -> Instruction:
    return Instruction("free", reads=names)


def running(instructions: list[Instruction], tier: str) -> list[Instruction]:
    """The instructions that run when all frames have a tier."""
    return [i for i in instructions if not i.when or tier in i.when]


def _ends(instructions: list[Instruction], outlive: Set[str]) -> dict[int, tuple[str, ...]]:
    """Registers whose life ends after the instruction at a position."""
    last: dict[str, int] = {}
    borrowed: dict[str, tuple[str, ...]] = {}
    for position, instruction in enumerate(instructions):
        for name in (*instruction.reads, *instruction.writes, *instruction.updates):
            if ":" in name and name[-1] != "?":
                last[name] = position
        if instruction.stream and instruction.row.asynchronous:
            borrowed[instruction.writes[0]] = (*instruction.reads, *instruction.updates)
        elif instruction.opcode == "wait":
            for name in borrowed.pop(instruction.reads[0], ()):
                if ":" in name:
                    last[name] = position
    ends: dict[int, list[str]] = {}
    for name, position in last.items():
        if name not in outlive:
            ends.setdefault(position, []).append(name)
    return {position: tuple(names) for position, names in ends.items()}


def _places(instructions: list[Instruction], tier: str, ends: dict[int, tuple[str, ...]]) -> dict[int, tuple[str, ...]]:
    """Positions among the instructions of one tier as positions among all."""
    numbers = [n for n, i in enumerate(instructions) if not i.when or tier in i.when]
    return {numbers[position]: names for position, names in ends.items()}


def _by_tier(
    instructions: list[Instruction], lives: Mapping[str, dict[int, tuple[str, ...]]]
) -> dict[int, list[Instruction]]:
    """One `free` for the registers that end at a position in all tiers, and one for each set of tiers that is less: of
    the frame of the instruction there, or if that has none, of the layer of the register's name."""
    found: dict[int, list[Instruction]] = {}
    for position in sorted({p for ends in lives.values() for p in ends}):
        groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        ended = dict.fromkeys(n for ends in lives.values() for n in ends.get(position, ()))
        for name in (n for n in ended if not n.startswith("tier.")):
            tiers = tuple(t for t, ends in lives.items() if name in ends.get(position, ()))
            frame = instructions[position].frame or _frame(name)
            groups.setdefault(("", ()) if tiers == TIERS else (frame, tiers), []).append(name)
        for (frame, tiers), names in groups.items():
            free = _free(tuple(names))
            found.setdefault(position, []).append(free.only(frame, tiers) if tiers else free)
    return found


def _frame(register: str) -> str:
    """The register with the tier of a layer's frame: `r.fn.s0.l5:i`, `r.w.l5.early:i` -> `tier.l5:i`."""
    base, _, symbol = register.partition(":")
    return f"tier.l{base.rpartition('.l')[2].partition('.')[0]}:{symbol}"


def _end_tiers(
    instructions: list[Instruction], frames: Mapping[str, None], outlive: Set[str]
) -> tuple[Instruction, ...]:
    """Ends the life of every tier after the last instruction that depends on it."""
    last = {i.frame: n for n, i in enumerate(instructions) if i.when and i.frame not in outlive}
    result: list[Instruction] = []
    for position, instruction in enumerate(instructions):
        result.append(instruction)
        ended = tuple(frame for frame in frames if last.get(frame) == position)
        result += [Instruction("free", reads=ended)] if ended else []
    return tuple(result)


def outside_reads(instructions: list[Instruction], tier: str = "") -> set[str]:
    """Registers that a block reads but does not write: what earlier blocks must leave alive for it."""
    written: set[str] = set()
    found: set[str] = set()
    for instruction in running(instructions, tier) if tier else instructions:
        found.update(n for n in (*instruction.reads, instruction.frame) if n and n not in written)
        written.update(instruction.writes)
    return found
