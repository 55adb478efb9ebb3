"""Rounds of micro-batches in the middle of an order: calls that repeat, each time with the next micro-batch.

A round of a role ends where it comes to a micro-batch for the first time, the same one for all roles.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import count
from operator import sub
from typing import TYPE_CHECKING

from titan.compiler.plan.frozen import dataclass

if TYPE_CHECKING:
    from titan.compiler.plan.program import BlockCall

FEWEST = 8  # rounds that are worth looking at
FAR = 1 << 20  # between the numbers of two blocks' calls: more than micro-batches


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
    elements = _numbered(calls)
    middle = len(calls) // 2
    if not calls or elements[middle] + 1 not in elements[middle:]:
        return None
    length = elements.index(elements[middle] + 1, middle) - middle
    steps = map(sub, elements[length:], elements)
    alike = bytes([step == 1 for step in steps])  # the call of the next round is this one, a micro-batch later
    left, right = alike.rfind(0, 0, middle) + 1, alike.find(0, middle)
    right = (len(alike) if right < 0 else right) + length  # all calls from left to right are in rounds
    numbers = [call.arguments for call in calls[left : left + length]]
    if max(map(len, numbers)) > 1:
        return None
    at = numbers.index(max(numbers))
    return OwnRounds(left + at, length, numbers[at][0], (right - left - at) // length)


def _numbered(calls: Sequence[BlockCall]) -> list[int]:
    """A number for each call, by one more where the same block is called with the next micro-batch."""
    blocks = defaultdict[str, int](count(FAR, FAR).__next__)
    return [blocks[name] + numbers[0] if numbers else -1 for name, numbers in calls]
