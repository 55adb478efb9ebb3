"""How far ahead is gathered: as far as the simulation gains by it and memory allows; its words say so."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from titan.compiler.cost.memory import memory_ledger
from titan.compiler.cost.simulate import simulate
from titan.compiler.lower import lower
from titan.compiler.search.distance import WORTH, Finalist, distances
from titan.compiler.search.search import estimator_of, search
from titan.compiler.spec.schema import Spec
from titan.compiler.strategy import Strategy

from tests.compiler.search.specs import write

PINS = "zero = 3; gather = each; reduce = each; data = 16; pipeline = 1; context = 1; recompute = none; micro_batch = 1"
START = Strategy(data=16, zero=3, micro_batches=4, stages=(12,))


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Spec:
    wishes = PINS.replace("; ", "\n    ")
    return write(tmp_path_factory.mktemp("distance"), wishes, nodes=2, batch=64)


def measured(spec: Spec, distance: int) -> Finalist:
    strategy = replace(START, prefetch=distance)
    plan = lower(spec, strategy)
    return Finalist(strategy, plan, simulate(plan), memory_ledger(plan))


def test_a_distance_hides_what_a_shorter_one_leaves_exposed(spec: Spec) -> None:
    """None, within blocks and across them; each layer ahead holds one layer more at most."""
    found = [measured(spec, distance) for distance in (0, 1, 2)]
    assert found[0].timeline.step > found[1].timeline.step > found[2].timeline.step
    layer = max(2 * b.elements for b in found[0].plan.buckets if b.name.startswith("l"))
    steps = [b.ledger.peak - a.ledger.peak for a, b in pairwise(found)]
    assert all(0 <= step <= 1.1 * layer for step in steps)


def test_the_chosen_distance_is_where_another_layer_gains_nothing(spec: Spec) -> None:
    machine = estimator_of(spec).machine
    best, why = distances(spec, measured(spec, 1), machine, measured(spec, 1).ledger.limit)
    chosen = best.strategy.prefetch
    times = [measured(spec, distance).timeline.step for distance in range(1, chosen + 2)]
    assert chosen > 1 and all(b <= (1 - WORTH) * a for a, b in pairwise(times[:-1]))
    assert times[-1] > (1 - WORTH) * times[-2]
    assert f"{chosen} layers ahead" in why and f"{chosen + 1} would gain" in why


def test_memory_keeps_the_distance_short(spec: Spec) -> None:
    """With a limit that the next layer would break, the distance stays, and the number is told."""
    start = measured(spec, 1)
    limit = start.ledger.upper
    tight = replace(start, ledger=memory_ledger(start.plan, None, limit))
    best, why = distances(spec, tight, estimator_of(spec).machine, limit)
    assert best is tight and "2 would hold" in why


def test_the_search_explains_the_distance(spec: Spec) -> None:
    found = search(spec)
    reason = {key: text for key, _, text in found.strategy.reasons}["prefetch"]
    assert found.strategy.zero == 3 and f"{found.strategy.prefetch} layer" in reason and "ahead" in reason


def test_a_written_distance_is_kept(tmp_path: Path) -> None:
    spec = write(tmp_path, PINS.replace("; ", "\n    ") + "\n    prefetch = 4", nodes=2, batch=64)
    assert search(spec).strategy.prefetch == 4
