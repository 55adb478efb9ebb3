"""The time of a step: a discrete-event walk of the programs of all roles, over the very plan that runs.

One clock per stream in whole nanoseconds. An asynchronous instruction starts when its stream is free and it has been
issued; a transfer when both sides have issued it and the channel is free; a collective across programs when the last
member has issued it. `wait` moves the compute clock to the completion. Compute beside a running collective is slower by
the cluster's figure. Roles are walked in program order and suspended at what another role has not issued yet, so that
no queue of events is needed; ranks of a role behave alike.

    busy      time of compute instructions
    exposed   compute waits for communication in progress
    bubble    compute waits for another role that has not come so far
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import cache
from itertools import chain

from titan.compiler.cost.machine import Machine
from titan.compiler.cost.meetings import Network
from titan.compiler.cost.prices import Prices
from titan.compiler.cost.steady import Counts, Rest, Standing, move, standing, taken_away
from titan.compiler.cost.strands import BlockPieces, Cutter
from titan.compiler.cost.timeline import Timeline, added, stretched
from titan.compiler.cost.walker import Runs, Walker
from titan.compiler.plan.program import BEGUN, BlockCall, Plan, Role
from titan.compiler.plan.rounds import Rounds, own_rounds, rounds
from titan.compiler.plan.tiers import at_start

Calls = list[tuple[BlockCall, ...]]  # of every role
PATIENCE = 24  # rounds of which one must add what the one before has added


class SimulationStalled(Exception):
    """Roles wait for each other: the plan makes no progress (the verifier names the cycle)."""


def simulate(
    plan: Plan, machine: Machine | None = None, order: str = "train", prices: Prices | None = None
) -> Timeline:
    """Timeline of one order. `machine` defaults to the cluster in the plan's settings. Training steps that do not wait
    for the norm are timed in their steady state: what one more of them adds.

    Raises SimulationStalled when the programs wait for each other.
    """
    plan = at_start(plan)
    prices = prices or Prices(plan, machine)
    if order != "train" or not any(name == "body" for name, _ in plan.roles[0].orders):
        repeated = rounds(own_rounds(role.order(order)) for role in plan.roles)
        return _whole(plan, prices, [role.order(order) for role in plan.roles], repeated)
    body = [role.order("body") for role in plan.roles]
    first, further = [_first(role) for role in plan.roles], [_further(role) for role in plan.roles]
    if prices.machine.cores:  # a step would be slowed by what the next one loads cores with
        two = [(*own, *a, *own, *b) for own, a, b in zip(body, first, further, strict=True)]
        three = [(*a, *own, *b) for own, a, b in zip(body, two, further, strict=True)]
        return added(_whole(plan, prices, two), _whole(plan, prices, three), _outside(prices))
    walk = _Walk(plan, prices)
    repeated = rounds(map(own_rounds, body))
    few, begun = walk.step(body, first, repeated), walk.standing()
    more, ended = walk.step(body, further, repeated), walk.standing()
    if ended.since(begun) is None:
        few, more = more, walk.step(body, further, repeated)
    return added(few, more, _outside(prices))


def _first(role: Role) -> tuple[BlockCall, ...]:
    """What follows the body in the first of steps whose norms are begun before their updates and waited for after the
    next body."""
    return (*_begun(role), *role.order("update"))


def _further(role: Role) -> tuple[BlockCall, ...]:
    begun = _begun(role)
    return (*role.order("check")[len(begun) :], *begun, *role.order("update"))


def _begun(role: Role) -> tuple[BlockCall, ...]:
    return tuple(call for call in role.order("check") if call.block.endswith(BEGUN))


def _whole(plan: Plan, prices: Prices, calls: Calls, repeated: Rounds | None = None) -> Timeline:
    """The calls of every role from nothing on, in real time."""
    walk = _Walk(plan, prices)
    if walk.network.loads is None:
        return walk.step(calls, [() for _ in calls], repeated)
    found = walk.go_on(calls)
    walk.network.load_meetings()
    return stretched(found, walk.network.loads.clock())


def _outside(prices: Prices) -> int:
    """Nanoseconds of a step outside its program."""
    return round(prices.machine.figures.get("step_seconds", 0.0) * 1e9)


class _Walk:
    """All roles on their way."""

    def __init__(self, plan: Plan, prices: Prices) -> None:
        self.prices, self.network = prices, Network(plan, prices.machine)
        runs = Runs()
        self.walkers = [Walker(at, pieces, self.network, runs) for at, pieces in self._pieces(plan).items()]
        self.going: dict[Walker, Iterator[None]] = {}
        self.stuck: set[Walker] = set()
        self.rest: Rest | None = None

    def _pieces(self, plan: Plan) -> dict[int, dict[str, BlockPieces]]:
        """The blocks of every role in pieces; of roles that are alike and lie alike those of the first."""
        cutter = Cutter(self.prices.price, cache(self.network.crosses), self.prices.issue)
        found: dict[int, dict[str, BlockPieces]] = {}
        for like in plan.alike:
            own, first = like.role.pipeline, like.first.pipeline
            shared = own != first and self.prices.lie_alike(like, self.network.crosses)
            found[own] = cutter.like(like, found[first]) if shared else cutter.cut(like.role)
        return found

    def step(self, body: Calls, further: Calls, repeated: Rounds | None) -> Timeline:
        """Every role does the body that all steps begin with, and what is further to do; as `go_on`."""
        before = taken_away(self.walkers)  # no body asks for it: the first one had nothing of the kind
        if repeated is None:
            self._through(body)
        else:
            self._body(body, repeated)
        for table, held in before:
            table |= {**held, **table}
        return self.go_on(further)

    def go_on(self, calls: Calls) -> Timeline:
        """Every role does its calls; the timeline of all that has been done."""
        if not self._through(calls):
            names = ", ".join(str(walker.pipeline) for walker in self.walkers if walker in self.stuck)
            raise SimulationStalled(f"roles {names} wait for each other")
        step = max(max(walker.clock, walker.latest) for walker in self.walkers) + _outside(self.prices)
        return Timeline(step, tuple(walker.result(step) for walker in self.walkers))

    def _body(self, calls: Calls, repeated: Rounds) -> None:
        """Walks up to the rounds, through some of them and to the end; where all roles stand before the rounds as they
        stood in a body before, they do what they did then."""
        begun, counts, at = None, list[Counts](), list(repeated.first)
        if self._through([own[:end] for own, end in zip(calls, at, strict=True)]):
            begun, counts = self.standing(), [Counts.of(walker) for walker in self.walkers]
            if self.rest is not None and self.rest.again(self.walkers, self.network, begun):
                return
            at = self._rounds(calls, repeated, begun)
        whole = self._through([own[end:] for own, end in zip(calls, at, strict=True)])
        if begun is not None and whole:
            self.rest = Rest.of(begun, counts, self.walkers, self.network)

    def _rounds(self, calls: Calls, repeated: Rounds, now: Standing) -> list[int]:
        """Walks round after round, from the first on, until one adds what the one before has added: so will the others.
        The position that each role has come to, or is on its way to where the roles do not go in rounds."""
        at = list(repeated.first)
        before: Standing | None = None
        counts: list[Counts] = []
        for number in range(min(repeated.times, PATIENCE)):
            now = standing(self.walkers, self.network, number) if number else now
            moved = None if before is None else now.since(before)
            left = repeated.times - number if moved is not None else 1
            after = [end + length * left for end, length in zip(at, repeated.length, strict=True)]
            if moved is not None:
                move(self.walkers, self.network, counts, moved, left)
                return after
            before, counts = now, [Counts.of(walker) for walker in self.walkers]
            whole = self._through([own[k:end] for own, k, end in zip(calls, at, after, strict=True)])
            at = after
            if not whole:
                break
        return at

    def _through(self, calls: Calls) -> bool:
        """Every role goes on with its calls, after those before. Whether all come to the end."""
        for walker, own in zip(self.walkers, calls, strict=True):
            walk = walker.walk(own)
            self.going[walker] = chain(self.going[walker], walk) if walker in self.stuck else walk
        ready = deque(walker for walker in self.walkers if walker not in self.stuck)
        self.stuck = set(self.walkers)
        while ready:
            walker = ready.popleft()
            if next(self.going[walker], walker) is walker:
                self.stuck.discard(walker)
            if self.network.woken:
                ready += self.network.take_woken()
        return not self.stuck

    def standing(self) -> Standing:
        return standing(self.walkers, self.network)
