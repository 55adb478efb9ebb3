"""The stage split against every split there is."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from titan.compiler.search.stages import balance


def slowest(costs: list[float], split: tuple[int, ...], first: float, last: float) -> float:
    begin, sums = 0, []
    for layers in split:
        sums.append(sum(costs[begin : begin + layers]))
        begin += layers
    sums[0] += first
    sums[-1] += last
    return max(sums)


def every_split(layers: int, stages: int) -> list[tuple[int, ...]]:
    cuts = combinations(range(1, layers), stages - 1)
    return [tuple(b - a for a, b in zip((0, *c), (*c, layers), strict=True)) for c in cuts]


@pytest.mark.parametrize("seed", range(40))
def test_no_split_is_better(seed: int) -> None:
    chance = random.Random(seed)
    layers = chance.randrange(2, 11)
    stages = chance.randrange(1, min(layers, 5) + 1)
    costs = [chance.choice([1.0, 1.0, 2.0, 3.5] if seed % 3 else [1.0]) for _ in range(layers)]
    first, last = chance.choice([0.0, 0.5, 4.0]), chance.choice([0.0, 1.5, 6.0])
    most = [chance.randrange(1, layers + 1) for _ in range(stages)] if seed % 2 else [layers] * stages
    allowed = [s for s in every_split(layers, stages) if all(n <= m for n, m in zip(s, most, strict=True))]
    found = balance(costs, stages, first, last, most)
    if not allowed:
        assert found is None
        return
    assert found is not None
    assert found in allowed
    best = min(slowest(costs, s, first, last) for s in allowed)
    assert slowest(costs, found, first, last) == pytest.approx(best)


def test_head_takes_the_place_of_layers() -> None:
    assert balance([1.0] * 16, 4, 0.0, 2.0) == (4, 4, 5, 3)
    assert balance([1.0] * 15, 4, 0.0, 1.0) == (4, 4, 4, 3)
    assert balance([1.0] * 12, 4, 0.0, 0.0) == (3, 3, 3, 3)


def test_more_stages_than_layers() -> None:
    assert balance([1.0, 1.0], 3) is None
