"""What one way to shard tells about others, against the closed forms of all of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from titan.compiler.search.enumeration import enumerate_space
from titan.compiler.search.ladder import NEAR, Ladders
from titan.compiler.search.search import estimator_of, memory_limit

from tests.compiler.search.specs import SMALL, write

MOE = SMALL.replace("12 * dense { ffn = 2816 }", "4 * moe { experts = 8, top_k = 2, shared = 1, ffn = 1024 }")


@pytest.mark.parametrize("model", [SMALL, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("offload", ["none", "activations", "both"])
def test_what_is_left_out_holds_more_or_takes_longer(tmp_path: Path, model: str, offload: str) -> None:
    wishes = f"tensor <= 2; context <= 2; offload = {offload}"
    spec = write(tmp_path, wishes, model=model, batch=16)
    estimator, ladders, held, slower = estimator_of(spec), Ladders(spec), 0, 0
    for s in enumerate_space(spec).candidates:
        ways = ladders.of(s).options
        estimates = [estimator.estimate(replace(s, **way)) for way in ways]
        for n, one in enumerate(estimates):
            for m, other in enumerate(estimates):
                if ways.holds[n] >> m & 1:
                    assert other.memory >= one.memory, (s, ways[n], ways[m])
                    held += m != n
                if ways.saves[s.micro_batches > 1][n] >> m & 1 and ways[n].get("reduce") == ways[m].get("reduce"):
                    assert other.seconds >= one.seconds * (1 - 1e-9), (s, ways[n], ways[m])
                    slower += m != n
    assert held > 100 and slower > 100


@pytest.mark.parametrize("memory", [2, 3, 5, 92])
def test_the_fastest_way_that_fits_is_tried(tmp_path: Path, memory: int) -> None:
    spec = write(tmp_path, "tensor <= 2; context <= 2", memory=memory, batch=16)
    estimator, ladders, limit, left_out = estimator_of(spec), Ladders(spec), memory_limit(spec), 0
    for s in enumerate_space(spec).candidates:
        ladder = ladders.of(s)
        tried = [e for _, e in ladder.try_tier(estimator, s, "none", limit)]
        every = [estimator.estimate(replace(s, **way), NEAR * limit) for way in ladder.options]
        best = min((e.seconds for e in every if e.memory <= limit), default=None)
        assert min((e.seconds for e in tried if e.memory <= limit), default=None) == best
        left_out += len(every) - len(tried)
    assert left_out > 0
