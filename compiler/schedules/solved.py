"""Solved orders: found for the actual times of chunks and transfers and the memory of each rank, by a portfolio.

Every named pattern that fits, as it is and pulled together by list scheduling; list schedules by priority; then local
search on the best. No single rule wins: list scheduling alone loses to the patterns from four ranks on, patterns lose
where ranks are unequal. All are costed by one timetable. A rank may hold one chunk, or two in any of three placements:
a V, dealt in turn, or neighbours (which is one larger chunk, split).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from random import Random

from titan.compiler.schedules import dualpipe, gpipe, interleaved, one_f_one_b, v_memory, zb_v, zero_bubble
from titan.compiler.schedules.improve import improve
from titan.compiler.schedules.listing import Costs, Policy, list_order, sequence_of
from titan.compiler.schedules.order import Element, Order, Pair, Schedule, Times, looped, straight, vee
from titan.compiler.schedules.timetable import Durations, StalledOrder, timetable

NAMED = (
    gpipe.GPIPE,
    one_f_one_b.ONE_F_ONE_B,
    interleaved.INTERLEAVED,
    zero_bubble.ZB_H1,
    zero_bubble.ZB_H2,
    zb_v.ZB_V,
    v_memory.V_HALF,
    v_memory.V_MIN,
    dualpipe.DUALPIPE_V,
)  # of one copy of the model
EFFORT = 150_000  # elements that local search may place again, in all
STARTS = 3  # of the best candidates, from which local search sets out
TOLERANCE = 1e-6  # of the bound: an order this near is taken at once


def placements(ranks: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Where the chunks of one copy may lie."""
    if chunks == 1:
        return (straight(ranks),)
    return vee(ranks), looped(ranks, chunks), neighbours(ranks, chunks)


def neighbours(ranks: int, chunks: int = 2) -> tuple[int, ...]:
    """`chunks` chunks in a row on each rank."""
    return tuple(c // chunks for c in range(ranks * chunks))


def solved(ranks: int, micro_batches: int, chunks: int = 2) -> Order:
    """The best candidate for equal chunks with F = I = W and the memory of 1F1B."""
    return solve(ranks, micro_batches, Costs.unit(ranks * chunks, ranks, float(ranks * chunks)), effort=0)


def solve(ranks: int, micro_batches: int, costs: Costs, effort: int = EFFORT) -> Order:
    """The order with the shortest step that keeps every rank within its limit. Deterministic.

    Raises ValueError when a limit is below what one micro-batch needs.
    """
    chunks = len(costs.frames) // ranks
    bound = min(lower_bound(p, micro_batches, costs.durations) for p in placements(ranks, chunks))
    found: list[tuple[float, int, Order]] = []
    for order in candidates(ranks, micro_batches, costs):
        if not costs.fits(order):
            continue
        time = timetable(order, costs.durations).makespan
        if time <= bound * (1 + TOLERANCE):
            return order
        if all(abs(time - other) > TOLERANCE * bound for other, *_ in found):  # alike in time, alike in all else
            found.append((time, len(found), order))
    if not found:
        raise ValueError("a limit is below what one micro-batch keeps on its rank")
    starts = [order for *_, order in sorted(found)[:STARTS]]
    improved = [improve(order, costs, effort // len(starts), Random(0), bound) for order in starts]
    return in_turn(min(improved, key=lambda order: timetable(order, costs.durations).makespan))


def in_turn(order: Order) -> Order:
    """The order with the micro-batches of every chunk in turn, in its forwards, its backwards and its weight gradients.

    Local search leaves them in any succession; a link hands messages over as they were sent, and one that is needed
    late but read first would hold up the others. Nothing comes later: the k-th item of a chunk could not begin before
    k of the chunk that it waits for were done, and the first k of these are now its own and those before it.
    """
    return replace(order, ranks=tuple(_in_turn(items) for items in order.ranks))


def _in_turn(items: tuple[Element | Pair, ...]) -> tuple[Element | Pair, ...]:
    elements = [e for item in items for e in ((item.forward, item.backward) if isinstance(item, Pair) else (item,))]
    forwards: dict[int, deque[int]] = {}
    for micro_batch, chunk in sorted((e.micro_batch, e.chunk) for e in elements if e.phase == "F"):
        forwards.setdefault(chunk, deque()).append(micro_batch)
    backwards = {chunk: deque(numbers) for chunk, numbers in forwards.items()}
    split: dict[int, deque[int]] = {chunk: deque() for chunk in forwards}

    def renamed(e: Element) -> Element:
        source = {"F": forwards, "W": split}.get(e.phase, backwards)
        found = Element(e.phase, e.chunk, source[e.chunk].popleft())
        if e.phase == "I":
            split[e.chunk].append(found.micro_batch)
        return found

    return tuple(
        Pair(renamed(item.forward), renamed(item.backward)) if isinstance(item, Pair) else renamed(item)
        for item in items
    )


def candidates(ranks: int, micro_batches: int, costs: Costs) -> Iterator[Order]:
    """Every named pattern and every list schedule."""
    chunks = len(costs.frames) // ranks
    patterns = list(named(ranks, micro_batches, chunks))
    for pattern in patterns:
        try:
            timetable(pattern, costs.durations)
        except StalledOrder:
            continue
        yield pattern
    for pattern in patterns:
        sequence = sequence_of(pattern)
        for patience in (0.0, 0.5, 1.0):
            yield from _found(pattern.placement, micro_batches, costs, Policy(patience, sequence))
    for placement in placements(ranks, chunks):
        for policy in _policies(ranks, chunks):
            yield from _found(placement, micro_batches, costs, policy)


def _found(placement: tuple[int, ...], micro_batches: int, costs: Costs, policy: Policy) -> Iterator[Order]:
    order = list_order(placement, micro_batches, costs, policy)
    if order is not None:
        yield order


def _policies(ranks: int, chunks: int) -> Iterator[Policy]:
    """Backward first; or forward first, up to a number of micro-batches in flight that falls along the pipeline."""
    yield Policy()
    yield Policy(1.0)
    for slope in (1, 2):
        ahead = tuple(chunks * slope * (ranks - rank) for rank in range(ranks))
        for deep_first in (True, False):
            for patience in (0.0, 1.0):
                yield Policy(patience, (), ahead, deep_first)


def named(ranks: int, micro_batches: int, chunks: int) -> Iterator[Order]:
    """The named orders of one copy with so many chunks per rank; those with one chunk as two halves of it, too."""
    for row in NAMED:
        if not row.legal(ranks, micro_batches):
            continue
        if row.takes(chunks):
            yield row.order(ranks, micro_batches, chunks)
        elif chunks == 2 and row.takes(1):
            yield halved(row.order(ranks, micro_batches))


def halved(order: Order) -> Order:
    """An order of one chunk per rank as one of two consecutive halves: forwards in order, backwards in reverse."""

    def halves(e: Element) -> tuple[Element, Element]:
        first, second = 2 * e.chunk, 2 * e.chunk + 1
        pair = (first, second) if e.phase == "F" else (second, first)
        return Element(e.phase, pair[0], e.micro_batch), Element(e.phase, pair[1], e.micro_batch)

    ranks = range(len(order.ranks))
    programs = tuple(tuple(half for e in order.elements(rank) for half in halves(e)) for rank in ranks)
    return Order(neighbours(len(order.ranks)), programs)


def lower_bound(placement: tuple[int, ...], micro_batches: int, durations: Durations) -> float:
    """Seconds that no order with this placement can beat: a rank's work after its first input can be there, and what
    must follow its last backward."""
    chunks, best = range(len(placement)), 0.0
    for rank in sorted(set(placement)):
        held = [c for c in chunks if placement[c] == rank]
        arrival = _path(durations.forward, placement, range(held[0] + 1), durations.transfer)
        arrival -= durations.forward[held[0]]
        leaving = _path(durations.backward_input, placement, range(held[0], -1, -1), durations.transfer)
        leaving += durations.backward_weight[0] - durations.backward_input[held[0]]
        whole = sum(durations.forward[c] + durations.backward_input[c] for c in held) * micro_batches
        weights = sum(durations.backward_weight[c] for c in held) * micro_batches
        best = max(best, arrival + whole + weights, arrival + whole + leaving)
    return best


def _path(times: tuple[float, ...], placement: tuple[int, ...], chunks: range, transfer: float) -> float:
    """One micro-batch through consecutive chunks."""
    total = sum(times[c] for c in chunks)
    return total + transfer * sum(placement[a] != placement[b] for a, b in pairwise(chunks))


def span_bubble(order: Order, durations: Durations) -> float:
    """Span bubble of the most loaded rank as a share of its span; of equally loaded ones the last to start counts
    (it has the least time)."""
    times = timetable(order, durations)
    ranks = range(len(order.ranks))
    return times.span_bubble(max(ranks, key=lambda rank: (round(times.work[rank], 9), times.starts[rank][0])))


def _bubble(ranks: int, times: Times, chunks: int) -> float:
    """What an even V leaves; a solved order is costed by its timetable where it is chosen."""
    return (ranks - 1) * times.forward / chunks


def _frames(ranks: int, micro_batches: int, rank: int, chunks: int) -> float:
    return min(micro_batches, ranks)


def _place(ranks: int, chunks: int) -> tuple[int, ...]:
    return straight(ranks) if chunks == 1 else vee(ranks)


SOLVED = Schedule("solved", solved, _bubble, _frames, _place, chunks=1, most_chunks=2, splits=True)
