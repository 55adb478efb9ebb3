"""The space against plain loops over every degree, and the closed forms against simulated plans."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from titan.compiler.cost.memory import memory_ledger
from titan.compiler.cost.simulate import simulate
from titan.compiler.lower import lower
from titan.compiler.schedules.registry import SCHEDULES
from titan.compiler.search.candidates import Candidate, with_stages
from titan.compiler.search.enumeration import BATCHES, FORMS, enumerate_space
from titan.compiler.search.search import estimator_of, memory_limit, search
from titan.compiler.search.space import EXPERT_RULES
from titan.compiler.spec.legality import check_pins, legal, rules_reading
from titan.compiler.strategy import Strategy

from tests.compiler.search.specs import write
from tests.compiler.spec.writing import only

KEYS = ("pipeline", "data", "context", "tensor", "sequence_parallel", "context_form", "context_heads", "micro_batch")


def brute(spec: object, world: int, batch: int) -> set[tuple[object, ...]]:
    """Every legal choice of degrees, form and micro-batch; forms that change nothing at their plainest."""
    found = set()
    degrees = range(1, world + 1)
    for p, d, c, t in product(degrees, repeat=4):
        if p * d * c * t != world:
            continue
        forms = [("gathered", 1), ("heads", 1), *(("ring", h) for h in range(1, c))] if c > 1 else [("gathered", 1)]
        for parallel, (form, heads), micro in product((False, True), forms, range(1, batch + 1)):
            if (t == 1 and parallel) or batch % (d * micro):
                continue
            s = Strategy(
                1, p, d, c, t, parallel, form, 1 if d * c > 1 else 0, "one_f_one_b", "none", micro, batch // d // micro,
                context_heads=heads,
            )  # fmt: skip
            if not legal(spec, s):  # type: ignore[arg-type]
                found.add((p, d, c, t, parallel, form, heads, micro))
    # sequence parallelism stands for both where it is legal
    return {f for f in found if f[4] or f[3] == 1 or (*f[:4], True, *f[5:]) not in found}


def test_only_what_is_not_available_is_asked_of_forms_and_of_batches() -> None:
    """Each group is asked with the first choices of the other: no rule may read choices of both."""
    both = [rule for rule in rules_reading(*FORMS) if rule in rules_reading(*BATCHES)]
    assert {rule.code for rule in both if rule not in EXPERT_RULES} == {"T224"}


@pytest.mark.parametrize("devices,batch", [(4, 8), (6, 12), (8, 8), (12, 24)])
def test_space_is_every_legal_choice(tmp_path: Path, devices: int, batch: int) -> None:
    spec = write(tmp_path, devices=devices, batch=batch)
    space = enumerate_space(spec)
    listed = [tuple(getattr(s, key) for key in KEYS) for s in space.candidates]
    assert len(listed) == len(set(listed))
    assert set(listed) == brute(spec, devices, batch)
    assert all(s.micro_batches * s.micro_batch * s.data == batch for s in space.candidates)


@pytest.mark.parametrize(
    "wishes,holds",
    [
        ("tensor <= 2", lambda s: s.tensor <= 2),
        ("pipeline in [2, 4]; context = 1", lambda s: s.pipeline in (2, 4) and s.context == 1),
        ("data >= 2; micro_batch = 2", lambda s: s.data >= 2 and s.micro_batch == 2),
        ("zero = 0; schedule = gpipe", lambda s: s.zero == 0 and s.schedule == "gpipe"),
        ("recompute = full; sequence_parallel = false", lambda s: s.recompute == "full" and not s.sequence_parallel),
        ("stages = [5, 7]", lambda s: s.stages == (5, 7) and s.pipeline == 2),
    ],
)
def test_wishes_hold_for_every_candidate(tmp_path: Path, wishes: str, holds: object) -> None:
    space = enumerate_space(write(tmp_path, wishes))
    assert space.families
    assert all(holds(s) for s in space.candidates)  # type: ignore[operator]


def test_estimates_are_near_the_simulation(tmp_path: Path) -> None:
    """Closed forms rank: over layouts of all kinds they stay within 15% in time and in memory."""
    spec = write(tmp_path, nodes=2, batch=128)
    estimator, limit = estimator_of(spec), memory_limit(spec)
    priced = [Candidate(s, estimator.estimate(s)) for s in enumerate_space(spec).candidates]
    fitting = sorted((c for c in priced if c.estimate.memory <= limit), key=lambda c: c.key)
    off = []
    for candidate in [c for c in fitting if c.work < 2000][::20]:
        strategy = with_stages(candidate, estimator, limit)
        plan, estimate = lower(spec, strategy), estimator.estimate(strategy)
        times = estimate.seconds / simulate(plan).seconds - 1
        bytes_ = estimate.memory / memory_ledger(plan).peak - 1
        off.append((abs(times), abs(bytes_), strategy))
    assert len(off) >= 10
    assert max(off, key=lambda o: o[0])[0] < 0.15, max(off, key=lambda o: o[0])
    assert max(off, key=lambda o: o[1])[1] < 0.15, max(off, key=lambda o: o[1])


@pytest.mark.parametrize("name", [name for name, row in SCHEDULES.items() if row.chunks > 1 or row.copies > 1])
def test_a_schedule_of_several_chunks_leaves_one_stage_as_it_is(tmp_path: Path, name: str) -> None:
    """One rank holds one stage, which no V and no second copy can order: the plan is that of 1F1B."""
    spec = write(tmp_path, f"pipeline = 1\n    schedule = {name}", model="tiny.llama", sequence=64, devices=3, batch=3)
    found = search(spec)
    assert (found.strategy.schedule, found.strategy.stages) == ("one_f_one_b", (4,))
    assert (
        "schedule",
        "user",
        f"written: schedule = {name}, which has no order of one stage",
    ) in found.strategy.reasons
    warning = only(check_pins(spec))
    assert (warning.code, warning.severity) == ("T251", "warning") and warning.message.startswith(name)


def test_two_chunks_of_one_rank_are_ordered_as_the_schedule_says(tmp_path: Path) -> None:
    spec = write(tmp_path, "pipeline = 1\n    stages = [6, 6]\n    schedule = dualpipe_v", devices=1, batch=2)
    assert {(b.schedule, b.chunks) for family in enumerate_space(spec).families for b in family.batches} == {
        ("dualpipe_v", 2)
    }
    assert {b.size for family in enumerate_space(spec).families for b in family.batches} == {1}  # two micro-batches
