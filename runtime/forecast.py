"""The known future of a program that leaves recompute tiers to the run: bytes of registers and workspace at every
instruction, for any choice of tiers, worked out while the program is loaded.

Live bytes are a sum: what every choice has in common, and for each frame what its tier holds. Both change at few
instructions, so a frame is a few stretches of constant height for each tier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.segment import TIERS
from titan.compiler.plan.sizes import Sizes
from titan.runtime.registers import Lives

Stretch = tuple[int, int, int]  # first instruction, one past the last, bytes


@dataclass(slots=True)
class Frame:
    """What a layer stores of one micro-batch.

    `chosen` is its watermark, `needed` the first instruction of its backward: until then it may be dropped. `stretches`
    are the bytes of each tier over time, `registers` those whose lives may depend on it.
    """

    chosen: int
    needed: int = -1
    stretches: dict[str, list[Stretch]] = field(default_factory=lambda: {tier: [] for tier in TIERS})
    registers: dict[str, None] = field(default_factory=dict)

    def height(self, tier: str, position: int) -> int:
        """Bytes of the frame at an instruction."""
        return next((height for start, stop, height in self.stretches[tier] if start <= position < stop), 0)


class Forecast:
    """`tiers` are what every frame is committed to, `committed` the bytes at each instruction with them: of this step
    what has been, and what will be."""

    def __init__(self, instructions: Sequence[Instruction], lives: Mapping[str, Lives], sizes: Sizes) -> None:
        self.lives = lives
        self.frames = {i.writes[0]: Frame(n) for n, i in enumerate(instructions) if i.opcode == "watermark"}
        self.tiers = dict.fromkeys(self.frames, TIERS[0])
        heights: dict[tuple[str, str], tuple[int, int]] = {}  # (frame, tier) -> (since, bytes)
        common, base = 0, []
        for n, instruction in enumerate(instructions):
            needed = sizes.workspace(instruction) if instruction.unit else 0
            if instruction.when:
                base.append(common)
                self._note(n, instruction, needed, heights)
                continue
            change = self._change(TIERS[0], n)
            base.append(max(common, common + change) + needed)
            common += change
        self._base = torch.tensor(base, dtype=torch.int64)
        self.committed = self._base.clone()

    def _change(self, tier: str, n: int) -> int:
        after = self.lives[tier].after
        return after[n] - (after[n - 1] if n else 0)

    def _note(
        self, n: int, instruction: Instruction, needed: int, heights: dict[tuple[str, str], tuple[int, int]]
    ) -> None:
        """A conditional instruction: the bytes of its frame change in the tiers that run it."""
        frame = self.frames[instruction.frame]
        frame.registers |= dict.fromkeys((*instruction.writes, *instruction.reads))
        if frame.needed < 0 and instruction.opcode not in ("forward", "free"):
            frame.needed = n
        for tier in instruction.when:
            since, height = heights.get((instruction.frame, tier), (n, 0))
            change = self._change(tier, n)
            stretches = frame.stretches[tier]
            stretches += [(since, n, height)] if height and since < n else []
            stretches.append((n, n + 1, max(height, height + change) + needed))
            heights[instruction.frame, tier] = (n + 1, height + change)

    def begin(self, tiers: Mapping[str, str]) -> None:
        """A new step, with tiers for all frames."""
        self.tiers = dict(tiers)
        self.committed = self.of(tiers)

    def of(self, tiers: Mapping[str, str]) -> torch.Tensor:
        """Bytes at each instruction with some tiers."""
        found = self._base.clone()
        for frame, tier in tiers.items():
            _add(found, self.frames[frame].stretches[tier], 0, 1)
        return found

    def set(self, frame: str, tier: str, position: int) -> None:
        """Commits a frame to a tier from an instruction on."""
        if tier != self.tiers[frame]:
            stretches = self.frames[frame].stretches
            _add(self.committed, stretches[self.tiers[frame]], position, -1)
            _add(self.committed, stretches[tier], position, 1)
            self.tiers[frame] = tier

    def peak(self, position: int = 0) -> int:
        """Most bytes from an instruction on."""
        return int(self.committed[position:].max())

    def highest(self, position: int) -> int:
        """The instruction with most bytes, from one on."""
        return position + int(self.committed[position:].argmax())

    def lower(self, frame: str, position: int) -> str:
        """The first tier in which a frame holds less at an instruction than it does now; its own where none does."""
        found, now = self.frames[frame], self.tiers[frame]
        height = found.height(now, position)
        lower = TIERS[TIERS.index(now) + 1 :]
        return next((tier for tier in lower if found.height(tier, position) < height), now)

    def live(self, position: int) -> int:
        """Bytes of registers just before an instruction."""
        return int(self.committed[position])

    def dropped(self, frame: str, tier: str, position: int) -> tuple[str, ...]:
        """Registers that a frame holds just before an instruction and would not hold in the tier."""
        now, then = self.lives[self.tiers[frame]], self.lives[tier]
        names = self.frames[frame].registers
        return tuple(n for n in names if now.lives_at(n, position) and not then.lives_at(n, position))


def _add(curve: torch.Tensor, stretches: Sequence[Stretch], position: int, sign: int) -> None:
    for start, stop, height in stretches:
        if stop > position:
            curve[max(start, position) : stop] += sign * height
