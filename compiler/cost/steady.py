"""When a further step adds what the last one has added.

All that a walk does with times is to add costs, to take the later of two, and to look at differences: what a strand
does is found for differences alone, its rounding too. So a program that begins with every clock later by the same time
does all it does later by that time, and counts the same busy, exposed and idle time. Meetings are found by their order,
so a step meets only itself where all members of every channel have issued as many when it begins. A stream or a meeting
that has ended when its role, or the last of its roles, goes on is never the later of two: it counts as that moment.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from titan.compiler.cost.meetings import Network
from titan.compiler.cost.walker import Walker


@dataclass(frozen=True, slots=True)
class Standing:
    """All that decides what roles do from here on: times in ns, and `fixed`, what must not move. `even`: whether no
    member of a channel has issued more than another."""

    times: dict[tuple[object, ...], int]
    fixed: dict[tuple[object, ...], int]
    even: bool

    def since(self, before: Standing) -> int | None:
        """The time by which everything has moved; None when not all has by the same."""
        if not (before.even and self.even and self.fixed == before.fixed and self.times.keys() == before.times.keys()):
            return None
        moved = {time - before.times[name] for name, time in self.times.items()}
        return moved.pop() if len(moved) == 1 else None


def standing(walkers: Iterable[Walker], network: Network) -> Standing:
    """Where roles stand between two steps."""
    times: dict[tuple[object, ...], int] = {}
    fixed: dict[tuple[object, ...], int] = {}
    clocks: dict[int, int] = {}
    for walker in walkers:
        role, clock = walker.pipeline, walker.clock
        clocks[role] = times[role,] = clock
        fixed[role, "first"], fixed[role, "last"] = walker.bubble_first, walker.bubble - walker.bubble_last
        for stream, number in walker.numbers.items():
            times[role, "stream", stream] = max(walker.streams[number], clock)
        for name, ends in walker.pending.items():
            times |= {(role, "pending", name, index): max(end, clock) for index, end in ends.items()}
        for name, meetings in walker.meetings.items():
            for index, meeting in meetings.items():
                times[role, "meeting", name, index] = max(meeting.end, clock)
                fixed[role, name, index] = meeting.cost
    for key, channel in network.channels.items():
        times["channel", *key] = max(channel.free, *(clocks.get(role, 0) for role in channel.roles))
    return Standing(times, fixed, all(channel.even for channel in network.channels.values()))
