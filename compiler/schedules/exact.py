"""The exact optimum of small cases, by a mixed-integer program (HiGHS through scipy, an optional extra).

Start times are continuous; for two elements of one rank that no precedence orders a binary says which comes first.
Equal phases of one chunk keep the order of their micro-batches, which costs nothing: micro-batches are alike. Memory
is linear in the same binaries: what is kept at a forward is the forwards before it less the weight gradients before it.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from titan.compiler.plan.frozen import dataclass
from titan.compiler.schedules.listing import Costs
from titan.compiler.schedules.order import Element, Order
from titan.compiler.schedules.timetable import timetable

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Optimum:
    """Seconds of the best order found and a bound that none can beat; equal when `proven`."""

    order: Order
    seconds: float
    bound: float

    @property
    def proven(self) -> bool:
        return self.seconds <= self.bound * (1 + 1e-4)


def optimum(
    placement: tuple[int, ...], micro_batches: int, costs: Costs, longest: float, seconds: float = 60.0
) -> Optimum | None:
    """The shortest step of one copy with this placement; `longest` is the time of any known order, `seconds` the time
    for the search. None when nothing was found in time. Needs the package scipy."""
    program = _Program(placement, micro_batches, costs, longest)
    return program.solve(seconds)


class _Program:
    def __init__(self, placement: tuple[int, ...], micro_batches: int, costs: Costs, longest: float) -> None:
        self.placement, self.micro_batches, self.costs = placement, micro_batches, costs
        self.chunks, self.longest = range(len(placement)), longest
        self.elements = [Element(p, c, i) for c in self.chunks for i in range(micro_batches) for p in "FIW"]
        self.number = {e: n for n, e in enumerate(self.elements)}
        self.rows: list[tuple[dict[int, float], float]] = []  # sum of coefficient * variable >= constant
        self.edges = self._edges()
        self.before = self._closure()
        self.order_of: dict[tuple[Element, Element], int] = {}
        self.makespan = len(self.elements)
        self.variables = self.makespan + 1

    def _edges(self) -> list[tuple[Element, Element]]:
        last = len(self.placement) - 1
        found = []
        for e in self.elements:
            c, i = e.chunk, e.micro_batch
            if e.phase == "F":
                found.append((e, Element("F", c + 1, i) if c < last else Element("I", c, i)))
            elif e.phase == "I":
                found.append((e, Element("W", c, i)))
                if c > 0:
                    found.append((e, Element("I", c - 1, i)))
            if i + 1 < self.micro_batches:
                found.append((e, Element(e.phase, c, i + 1)))
        return found

    def _closure(self) -> set[tuple[Element, Element]]:
        """All pairs that the edges order."""
        after: dict[Element, set[Element]] = {}
        following: dict[Element, list[Element]] = {}
        for a, b in self.edges:
            following.setdefault(a, []).append(b)

        def reach(e: Element) -> set[Element]:
            if e not in after:
                after[e] = set()
                for b in following.get(e, ()):
                    after[e] |= {b} | reach(b)
            return after[e]

        return {(a, b) for a in self.elements for b in reach(a)}

    def solve(self, seconds: float) -> Optimum | None:
        for a, b in self.edges:
            self._after(a, b)
        for e in self.elements:
            self.rows.append(({self.makespan: 1.0, self.number[e]: -1.0}, self.costs.durations.of(e)))
        for rank in sorted(set(self.placement)):
            self._one_at_a_time([e for e in self.elements if self.placement[e.chunk] == rank])
        if self.costs.limits:
            for rank in sorted(set(self.placement)):
                self._memory([e for e in self.elements if self.placement[e.chunk] == rank], self.costs.limits[rank])
        return self._run(seconds)

    def _after(self, a: Element, b: Element) -> None:
        fifo = a.phase == b.phase and a.chunk == b.chunk
        moved = 0.0 if fifo or self.placement[a.chunk] == self.placement[b.chunk] else self.costs.durations.transfer
        self.rows.append(({self.number[b]: 1.0, self.number[a]: -1.0}, self.costs.durations.of(a) + moved))

    def _one_at_a_time(self, elements: list[Element]) -> None:
        big = self.longest
        for a, b in combinations(elements, 2):
            if (a, b) in self.before or (b, a) in self.before:
                continue
            y = self.order_of[a, b] = self.variables
            self.variables += 1
            first, second = self.number[a], self.number[b]
            self.rows.append(({second: 1.0, first: -1.0, y: -big}, self.costs.durations.of(a) - big))
            self.rows.append(({first: 1.0, second: -1.0, y: big}, self.costs.durations.of(b)))

    def _memory(self, elements: list[Element], limit: float) -> None:
        for forward in (e for e in elements if e.phase == "F"):
            row: dict[int, float] = {}
            constant = self.costs.frames[forward.chunk] - limit
            for other in elements:
                if other == forward or other.phase == "I":
                    continue
                size = self.costs.frames[other.chunk] * (1 if other.phase == "F" else -1)
                if (other, forward) in self.before:
                    constant += size
                elif (other, forward) in self.order_of:
                    y = self.order_of[other, forward]
                    row[y] = row.get(y, 0.0) - size
                elif (forward, other) in self.order_of:
                    constant += size
                    y = self.order_of[forward, other]
                    row[y] = row.get(y, 0.0) + size
            if row:
                self.rows.append((row, constant))

    def _run(self, seconds: float) -> Optimum | None:
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        entries = [(r, v, k) for r, (row, _) in enumerate(self.rows) for v, k in row.items()]
        where = (np.array([e[0] for e in entries]), np.array([e[1] for e in entries]))
        matrix = coo_array((np.array([e[2] for e in entries]), where), shape=(len(self.rows), self.variables))
        least = np.array([constant for _, constant in self.rows])
        integer = np.zeros(self.variables)
        integer[self.makespan + 1 :] = 1
        upper = np.full(self.variables, self.longest)
        upper[self.makespan + 1 :] = 1
        goal = np.zeros(self.variables)
        goal[self.makespan] = 1
        found = milp(
            goal,
            integrality=integer,
            bounds=Bounds(np.zeros(self.variables), upper),
            constraints=LinearConstraint(matrix.tocsr(), least, np.full(len(self.rows), np.inf)),
            options={"time_limit": seconds},
        )
        return None if found.x is None else self._read(found.x, float(found.mip_dual_bound))

    def _read(self, values: np.ndarray, bound: float) -> Optimum:
        placed = sorted(self.elements, key=lambda e: (values[self.number[e]], self.number[e]))
        ranks = range(max(self.placement) + 1)
        programs = tuple(tuple(e for e in placed if self.placement[e.chunk] == rank) for rank in ranks)
        order = Order(self.placement, programs)
        return Optimum(order, timetable(order, self.costs.durations).makespan, bound)
