"""The search against every legal plan of small problems, compiled and simulated (`tests.benchmarks.search`: 500)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from titan.compiler.cost.simulate import simulate
from titan.compiler.lower import lower
from titan.compiler.strategy import Strategy
from titan.grammar.diagnostics import TitanError

from tests.benchmarks import search as benchmark
from tests.benchmarks.search import Outcome, problem, read, solve
from tests.compiler.search.specs import write

NUMBER, MOST = 4, 40


def test_finds_the_optimum() -> None:
    random_ = random.Random(7)
    outcomes: list[Outcome] = []
    while len(outcomes) < NUMBER:
        try:
            found = solve(read(problem(random_)), MOST)
        except TitanError:
            continue
        if found is not None and found.best is not None:
            outcomes.append(found)
    assert all(o.found is not None and o.excess <= 0.01 for o in outcomes)
    assert sum(o.excess <= 1e-9 for o in outcomes) >= NUMBER - 1


def test_a_search_that_refuses_everything_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Problems with a plan that fits, of which the search finds none: counted, though there is no worst one."""
    monkeypatch.setattr(benchmark, "solve", lambda spec: Outcome(plans=3, best=1, found=None))
    found = benchmark.benchmark(2, 0)
    assert found["wrongly_refused"] == found["problems"] == 2 and found["optimal_pct"] == 0 and found["worst"] is None


def test_a_split_that_memory_forces_is_found() -> None:
    """Two stages whose head would have the last one hold fewer layers than memory lets the first one hold more."""
    wishes = ("context = 1", "recompute = none", "zero <= 1", "schedule = one_f_one_b")
    numbers = {
        "hidden": 2048, "kv_heads": 8, "ffn": 6144, "layers": 4, "nodes": 1, "devices": 4, "sequence": 3072, "batch": 8,
        "memory": 4, "wishes": "\n    ".join(wishes),
    }  # fmt: skip
    found = solve(read(numbers))
    assert found is not None and found.excess == 0


TIGHT = {
    # the fastest way to shard holds more than estimated, the next one fits
    "sharding": ({"kv_heads": 2, "ffn": 6144, "layers": 5, "devices": 4, "sequence": 1536, "batch": 2, "memory": 4},
                 ("recompute = none", "zero = 3", "tensor <= 2", "schedule = one_f_one_b")),
    # the split that is best for time holds less than estimated
    "split": ({"kv_heads": 8, "ffn": 3072, "layers": 5, "devices": 2, "sequence": 1536, "batch": 2, "memory": 5},
              ("context = 1", "recompute = selective", "zero = 2", "tensor = 1", "schedule = one_f_one_b")),
    # of ranks with a layer each ZeRO-1 holds less than ZeRO-3, which needs whole buckets beside its shards
    "layers": ({"kv_heads": 2, "ffn": 9216, "layers": 3, "devices": 6, "sequence": 3072, "batch": 6, "memory": 4},
               ("context = 1", "tensor = 1", "schedule = one_f_one_b")),
    # by estimate sums of each micro-batch hide better than one at the end
    "sums": ({"kv_heads": 8, "ffn": 9216, "layers": 4, "devices": 6, "sequence": 3072, "batch": 4, "memory": 6},
             ("context <= 2", "recompute = full", "micro_batch = 1", "tensor = 1", "schedule in [one_f_one_b, gpipe]")),
}  # fmt: skip


@pytest.mark.parametrize("case", TIGHT)
def test_what_closed_forms_get_wrong_is_found(case: str) -> None:
    numbers, wishes = TIGHT[case]
    found = solve(read({"hidden": 2048, "nodes": 1, **numbers, "wishes": "\n    ".join(wishes)}))
    assert found is not None and found.excess == 0


def test_uneven_groups_of_micro_batches_make_progress(tmp_path: Path) -> None:
    """60 micro-batches over 16 interleaved stages: groups of 20, for which more sends must be outstanding."""
    spec = write(tmp_path, nodes=2, batch=60, model=LAYERS)
    stages = (1,) * 32
    strategy = Strategy(pipeline=16, micro_batches=60, schedule="interleaved", stages=stages)
    assert simulate(lower(spec, strategy)).step > 0


LAYERS = """model {
    vocab = 1024
    hidden = 256
    max_positions = 4096
    attention = gqa { heads = 4, kv_heads = 4 }
    layers = 32 * dense { ffn = 512 }
    rope = { theta = 10000 }
}"""
