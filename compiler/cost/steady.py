"""When what follows adds what the last part has added: a step after a step, a round of micro-batches after a round.

All that a walk does with times is to add costs, to take the later of two, and to look at differences: what a strand
does is found for differences alone, its rounding too. So a part that begins with every clock later by the same time
does all it does later by that time, and counts the same busy, exposed and idle time; and what follows an equal part is
equal again. A stream or a meeting that has ended when its role, or the last of its roles, goes on is never the later
of two: it counts as that moment. The number of a micro-batch only says which completions belong together.

So too when roles stand in a step as they have stood in one before, at the same call: they end it as they did then.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import Any, TypeVar

from titan.compiler.cost.meetings import UNKNOWN, Meeting, Network
from titan.compiler.cost.walker import Walker
from titan.compiler.plan.frozen import dataclass

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Standing:
    """All that decides what roles do from here on: times in ns, and `fixed`, what must not move."""

    times: dict[tuple[object, ...], int]
    fixed: dict[tuple[object, ...], object]

    def since(self, before: Standing) -> int | None:
        """The time by which everything has moved; None when not all has by the same."""
        if self.fixed != before.fixed or self.times.keys() != before.times.keys():
            return None
        moved = {time - before.times[name] for name, time in self.times.items()}
        return moved.pop() if len(moved) == 1 else None


def standing(walkers: Iterable[Walker], network: Network, micro_batch: int = 0) -> Standing:
    """Where roles stand between two parts; micro-batches are counted from `micro_batch` on."""
    times: dict[tuple[object, ...], int] = {}
    fixed: dict[tuple[object, ...], object] = {}
    clocks = {walker.pipeline: walker.clock for walker in walkers}
    places: dict[Meeting, tuple[object, ...]] = {}  # of those that not all members have issued
    for key, channel in network.channels.items():
        times["channel", *key] = max(channel.free, *(clocks.get(role, 0) for role in channel.roles))
        for member, coming in enumerate(channel.coming):
            for number, meeting in enumerate(coming):
                place = places[meeting] = ("coming", *key, member, number)
                times[place], fixed[place] = meeting.start, (meeting.missing, meeting.cost)
    for walker in walkers:
        role, clock = walker.pipeline, walker.clock
        times[role,] = clock
        fixed[role, "first"], fixed[role, "last"] = walker.bubble_first, walker.bubble - walker.bubble_last
        for number, end in enumerate(walker.streams):
            times[role, "stream", number] = max(end, clock)
        for name, ends in walker.pending.items():
            for index, end in ends.items():
                times[role, "pending", name, _from(index, micro_batch)] = max(end, clock)
        for name, meetings in walker.meetings.items():
            for index, meeting in meetings.items():
                place = (role, "meeting", name, _from(index, micro_batch))
                fixed[place] = meeting.cost, places.get(meeting)
                if meeting.end != UNKNOWN:
                    times[place] = max(meeting.end, clock)
    return Standing(times, fixed)


def _from(index: int, micro_batch: int) -> int:
    return index - micro_batch if index >= 0 else index


def move(walkers: Iterable[Walker], network: Network, before: Iterable[Counts], by: int, rounds: int) -> None:
    """Sets everything forward by so many rounds that take `by` ns each and add what was added since `before`."""
    far = by * rounds
    meetings: dict[Meeting, None] = {}
    for walker, counts in zip(walkers, before, strict=True):
        counts.repeat(walker, rounds)
        walker.clock += far
        walker.latest += far
        walker.active += far
        walker.streams = [end + far for end in walker.streams]
        for ends in walker.pending.values():
            _replace(ends, {_from(index, -rounds): end + far for index, end in ends.items()})
        for issued in walker.meetings.values():
            meetings |= dict.fromkeys(issued.values())
            _replace(issued, {_from(index, -rounds): meeting for index, meeting in issued.items()})
    for channel in network.channels.values():
        channel.free += far
        meetings |= {meeting: None for coming in channel.coming for meeting in coming}
    for meeting in meetings:
        meeting.start += far
        meeting.end += far if meeting.end != UNKNOWN else 0


def _replace(table: dict[int, V], other: dict[int, V]) -> None:
    table.clear()
    table |= other


@dataclass(frozen=True, slots=True)
class Counts:
    """What a role has counted before a round."""

    busy: int
    exposed: int
    bubble: int

    @classmethod
    def of(cls, walker: Walker) -> Counts:
        return cls(walker.busy, walker.exposed, walker.bubble)

    def repeat(self, walker: Walker, rounds: int) -> None:
        """Counts the round so many times more."""
        more = walker.bubble - self.bubble
        walker.busy += (walker.busy - self.busy) * rounds
        walker.exposed += (walker.exposed - self.exposed) * rounds
        walker.bubble += more * rounds
        walker.bubble_last += more * rounds


def taken_away(walkers: Iterable[Walker]) -> list[tuple[dict[int, Any], dict[int, Any]]]:
    """Empties the tables of what is pending and of what was issued; each with what it held."""
    tables = [table for walker in walkers for table in walker.tables() if table]
    held = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    return list(zip(tables, held, strict=True))


@dataclass(frozen=True, slots=True)
class Rest:
    """What roles do from a standing on, where they had `counted` so much, until nothing is under way; then they stand
    as `ended`, and channels are `free`."""

    begun: Standing
    counted: tuple[Counts, ...]
    ended: tuple[Walker, ...]
    free: tuple[int, ...]

    @classmethod
    def of(cls, begun: Standing, counted: Iterable[Counts], walkers: Iterable[Walker], network: Network) -> Rest | None:
        """What roles have done since a standing; None where something is under way."""
        channels = network.channels.values()
        if any(any(channel.coming) for channel in channels) or any(any(walker.tables()) for walker in walkers):
            return None
        ended = tuple([copy(walker) for walker in walkers])
        for walker in ended:
            walker.streams = list(walker.streams)
        return cls(begun, tuple(counted), ended, tuple([channel.free for channel in channels]))

    def again(self, walkers: Iterable[Walker], network: Network, now: Standing) -> bool:
        """Roles do the same from where they stand now. False where they do not stand as they stood."""
        by = now.since(self.begun)
        if by is None:
            return False
        taken_away(walkers)
        for walker, counted, ended in zip(walkers, self.counted, self.ended, strict=True):
            walker.clock, walker.latest, walker.active = ended.clock + by, ended.latest + by, ended.active + by
            walker.streams = [end + by for end in ended.streams]
            walker.bubble_last = walker.bubble + ended.bubble_last - counted.bubble
            walker.busy += ended.busy - counted.busy
            walker.exposed += ended.exposed - counted.exposed
            walker.bubble += ended.bubble - counted.bubble
        for channel, free in zip(network.channels.values(), self.free, strict=True):
            channel.free = free + by
            for coming in channel.coming:
                coming.clear()
        return True
