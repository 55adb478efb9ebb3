"""Rounds of micro-batches in the middle of an order: calls that repeat, each time with the next micro-batch.

A round of a role ends where it comes to a micro-batch for the first time, the same one for all roles.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.program import BlockCall, called

FEWEST = 8  # rounds that are worth looking at


@dataclass(frozen=True, slots=True)
class OwnRounds:
    """Rounds of one role: the position at which they begin, the calls of each, the micro-batch that the first one comes
    to, and how many they are."""

    at: int
    length: int
    micro_batch: int
    times: int


@dataclass(frozen=True, slots=True)
class Rounds:
    """`first[r]`: the position at which the rounds of the r-th role begin; `length[r]`: calls of each; `times` rounds
    that all roles have."""

    first: tuple[int, ...]
    length: tuple[int, ...]
    times: int


def rounds(roles: Iterable[OwnRounds | None]) -> Rounds | None:
    """The rounds of all roles together; None where there are few."""
    found = list(roles)
    known = [own for own in found if own is not None]
    if len(known) < len(found):
        return None
    begin = max(own.micro_batch for own in known)
    times = min(own.micro_batch + own.times for own in known) - begin
    if times < FEWEST:
        return None
    first = tuple(own.at + (begin - own.micro_batch) * own.length for own in known)
    return Rounds(first, tuple(own.length for own in known), times)


def own_rounds(calls: Sequence[BlockCall]) -> OwnRounds | None:
    """The rounds around the middle of a role's calls, where there are any."""
    found, middle = repeats(called(calls)), len(calls) // 2
    if found is None:
        return None
    begin, length = found.begin, found.length
    numbers = [call.arguments for call in calls[begin : found.end]]
    if any(len(own) != 1 for own in numbers[:length]):  # a block has as many in all its calls
        return None
    newest = [own[0] for own in numbers]
    further = bytes([b - a == 1 for a, b in zip(newest, newest[length:], strict=False)])
    left, right = further.rfind(0, 0, middle - begin) + 1, further.find(0, middle - begin)
    right = (len(further) if right < 0 else right) + length  # from left to right rounds are a micro-batch apart
    at = newest.index(max(newest[left : left + length]), left)
    return OwnRounds(begin + at, length, newest[at], (right - at) // length)


@dataclass(frozen=True, slots=True)
class Repeats:
    """Names in a list, from `begin` to `end`, that all are the ones `length` places before and after."""

    begin: int
    end: int
    length: int


def repeats(names: list[str]) -> Repeats | None:
    """Those around the middle, where that is named again."""
    middle = len(names) // 2
    if not names or names[middle] not in names[middle + 1 :]:
        return None
    length = names.index(names[middle], middle + 1) - middle
    after = _common(names[middle:], names[middle + length :])
    before = _common(names[:middle][::-1], names[length : middle + length][::-1])
    return Repeats(middle - before, middle + after + length, length)


def _common(one: list[str], other: list[str]) -> int:
    """How many names two lists have in common at their beginning."""
    done, more = 0, min(len(one), len(other))
    most = more
    while more:
        if done + more <= most and one[done : done + more] == other[done : done + more]:
            done += more
        else:
            more //= 2
    return done
