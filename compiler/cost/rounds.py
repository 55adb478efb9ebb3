"""Rounds of micro-batches in the middle of an order: calls that repeat, each time with the next micro-batch.

A round of a role ends where it comes to a micro-batch for the first time, the same one for all roles.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import and_, eq, sub

from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.program import BlockCall

FEWEST = 8  # rounds that are worth looking at


@dataclass(frozen=True, slots=True)
class Rounds:
    """`first[r]`: the position at which the rounds of the r-th role begin; `length[r]`: calls of each; `times` rounds
    that all roles have."""

    first: tuple[int, ...]
    length: tuple[int, ...]
    times: int


def rounds(orders: Sequence[Sequence[BlockCall]]) -> Rounds | None:
    """The rounds around the middle of all roles' calls; None where there are few."""
    found = [_around_the_middle(calls) for calls in orders]
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        return None
    begin = max(micro_batch for _, _, micro_batch, _ in known)
    times = min(micro_batch + times for _, _, micro_batch, times in known) - begin
    if times < FEWEST:
        return None
    first = tuple(at + (begin - micro_batch) * length for at, length, micro_batch, _ in known)
    return Rounds(first, tuple(length for _, length, _, _ in known), times)


def _around_the_middle(calls: Sequence[BlockCall]) -> tuple[int, int, int, int] | None:
    """Where rounds begin, how many calls one has, the micro-batch that the first one comes to, and how many follow."""
    names, numbers = [call.block for call in calls], [call.arguments for call in calls]
    middle = len(calls) // 2
    if not calls or names[middle] not in names[middle + 1 :] or max(map(len, numbers)) > 1:
        return None
    length = names.index(names[middle], middle + 1) - middle
    newest = [own[0] if own else -1 for own in numbers]
    same = map(eq, names[length:], names)
    further = map((1).__eq__, map(sub, newest[length:], newest))
    alike = bytes(map(and_, same, further))  # the call of the next round is this one, a micro-batch later
    if not alike[middle]:
        return None
    left, right = alike.rfind(0, 0, middle) + 1, alike.find(0, middle)
    right = (len(alike) if right < 0 else right) + length  # all calls from left to right are in rounds
    micro_batch = max(newest[left : left + length])
    at = newest.index(micro_batch, left)
    return at, length, micro_batch, (right - at) // length
