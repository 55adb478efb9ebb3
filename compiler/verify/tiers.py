"""Proof (h): what a plan leaves to the run, the recompute tier of each frame, cannot break what the other proofs say.

They are carried out with all frames in each tier. This one says that frames are independent of each other, so that what
holds for three choices holds for all: instructions of a tier touch a register that another frame's touch too only in
the same way in all tiers; no rank waits for another because of a tier; and a lower tier stores part of what a higher
one does, so that a frame may be dropped at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby, pairwise

from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.program import Block, Plan, Role
from titan.compiler.plan.segment import TIERS
from titan.compiler.verify.findings import Finding, at
from titan.compiler.verify.registers import registers

ALONE = frozenset(("forward", "recompute", "backward", "backward_input", "free"))  # opcodes that no other rank notices


def tiers(plan: Plan) -> list[Finding]:
    """Findings of proof (h)."""
    if not any(i.when for part in plan.stretches for i in part.instructions):
        return []
    found = _alone(plan)
    if not plan.adaptive:
        return [*found, Finding("T780", "instructions depend on tiers, but no watermark chooses any")]
    return found or _alive(plan) or [f for role in plan.roles for f in (*_independent(role), *_nested(role))]


def _alone(plan: Plan) -> list[Finding]:
    """Conditions are tiers, and what depends on them involves this rank alone."""
    found = []
    for role, block, index, instruction in _conditional(plan):
        unknown = set(instruction.when) - set(TIERS)
        if unknown or not instruction.frame.startswith("tier.l"):
            message = f"`{instruction.frame}` with {'+'.join(instruction.when)}: tiers are {', '.join(TIERS)}"
            found.append(at("T780", message, role, block, index))
        elif instruction.opcode not in ALONE:
            message = f"{instruction.opcode} depends on the tier that a rank chooses for itself"
            found.append(at("T781", message, role, block, index))
    return found


def _conditional(plan: Plan) -> Iterator[tuple[Role, Block, int, Instruction]]:
    for role in plan.roles:
        for block in role.blocks:
            for index, instruction in enumerate(block.instructions):
                if instruction.when:
                    yield role, block, index, instruction


def _alive(plan: Plan) -> list[Finding]:
    """A tier is chosen before anything depends on it, and forgotten after: proof (a) of what is left of the plan."""
    roles = tuple(
        replace(role, blocks=tuple(replace(b, instructions=tuple(_skeleton(b.instructions))) for b in role.blocks))
        for role in plan.roles
    )
    return [replace(f, code="T780", index=-1) for f in registers(replace(plan, roles=roles))]


def _skeleton(instructions: Iterable[Instruction]) -> Iterator[Instruction]:
    for instruction in instructions:
        if instruction.when:
            yield Instruction("report", reads=(instruction.frame,))
        elif instruction.opcode == "watermark":
            yield instruction
        elif instruction.opcode == "free":
            held = tuple(name for name in instruction.reads if name.startswith("tier."))
            if held:
                yield Instruction("free", reads=held)


Touches = dict[str, dict[str, dict[str, list[tuple[int, str]]]]]  # name -> frame -> tier -> (index, what is done to it)


def _touches(block: Block) -> Touches:
    found: Touches = {}
    for index, i in enumerate(block.instructions):
        if i.when:
            read = "free" if i.opcode == "free" else "read"
            done = (*((n, "write") for n in i.writes), *((n, read) for n in i.reads), *((n, "add") for n in i.updates))
            for name, what in done:
                frames = found.setdefault(name, {}).setdefault(i.frame, {tier: [] for tier in TIERS})
                for tier in i.when:
                    frames[tier].append((index, what))
    return found


def _independent(role: Role) -> list[Finding]:
    """A register of several frames is touched in the same way in all tiers, by one frame after the other."""
    found = []
    tables = [(block, _touches(block)) for block in role.blocks]
    frames: dict[str, set[str]] = {}
    for _, table in tables:
        for name, by_frame in table.items():
            frames.setdefault(name.partition(":")[0], set()).update(f.partition(":")[0] for f in by_frame)
    for block, table in tables:
        for name, by_frame in table.items():
            if len(frames[name.partition(":")[0]]) == 1:
                continue
            spans = []
            for frame, by_tier in by_frame.items():
                ways = {_way(what for _, what in touched) for touched in by_tier.values()}
                places = [index for touched in by_tier.values() for index, _ in touched]
                spans.append((min(places), max(places)))
                if len(ways) > 1:
                    message = f"what is done to `{name}`, which other frames use, depends on {frame}"
                    found.append(at("T782", message, role, block, min(places)))
            spans.sort()
            for (_, end), (start, _) in pairwise(spans):
                if start <= end:
                    found.append(at("T782", f"frames that use `{name}` do so in turns", role, block, start))
    return found


def _way(done: Iterable[str]) -> tuple[str, ...]:
    """What is done to a register in turn; that it is read more than once changes nothing."""
    return tuple(what for what, repeats in groupby(done) for _ in ([0] if what == "read" else repeats))


def _nested(role: Role) -> list[Finding]:
    """What a tier stores of a frame when its block ends, the tier before it stores too."""
    found = []
    for block in role.blocks:
        for index, chosen in enumerate(block.instructions):
            if chosen.opcode == "watermark":
                stored = [_stored(block, chosen.writes[0], tier) for tier in TIERS]
                for tier, more, less in zip(TIERS[1:], stored, stored[1:]):
                    if less - more:
                        message = (
                            f"only tier {tier} stores {', '.join(sorted(less - more))}: no frame can be demoted to it"
                        )
                        found.append(at("T783", message, role, block, index))
    return found


def _stored(block: Block, frame: str, tier: str) -> set[str]:
    live: set[str] = set()
    for instruction in block.instructions:
        if instruction.when and not (instruction.frame == frame and tier in instruction.when):
            continue
        live = live - set(instruction.reads) if instruction.opcode == "free" else live | set(instruction.writes)
    return live
