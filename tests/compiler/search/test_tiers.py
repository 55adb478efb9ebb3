"""Recompute tiers layer by layer: the cheapest counts, by brute force; plans that just fit."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from titan.compiler.cost.machine import read_machine
from titan.compiler.cost.memory import memory_ledger
from titan.compiler.lower import lower
from titan.compiler.plan.text import print_plan
from titan.compiler.search.measured import measured
from titan.compiler.search.search import search
from titan.compiler.search.tiers import Counts, fewest, sentence, with_tiers
from titan.compiler.spec.model import Dense, LayerGroup
from titan.compiler.strategy import Strategy
from titan.compiler.verify.proofs import verify
from titan.grammar.diagnostics import TitanError

from tests.equivalence.configurations import Configuration, spec_of, strategy_of


@given(*(st.integers(low, high) for low, high in ((1, 9), (0, 200), (0, 100), (0, 10), (0, 10), (0, 50))))
def test_the_counts_are_the_cheapest_of_all(
    layers: int, least: int, more: int, middle: int, light: int, heavier: int
) -> None:
    sizes, costs = (float(least + more), least + middle * more / 10, float(least)), (0.0, light, light + heavier)
    for limit in (sizes[0], least + 0.6 * more, least + 0.2 * more, float(least)):
        found = fewest(layers, sizes, costs, limit)
        assert found.none + found.selective + found.full == layers
        fitting = []
        for none, selective in product(range(layers + 1), repeat=2):
            full = layers - none - selective
            held = (none * sizes[0] + selective * sizes[1] + full * sizes[2]) / layers
            if full >= 0 and held <= limit + 1e-6:
                fitting.append(selective * costs[1] + full * costs[2])
        assert found.seconds <= min(fitting) + 1e-9


@given(*(st.integers(1, 50) for _ in range(3)), st.integers(1, 6), *(st.integers(0, 20) for _ in range(3)))
def test_the_host_is_one_more_way_for_a_layer(
    low: int, between: int, more: int, layers: int, light: int, heavy: int, copy: int
) -> None:
    """Each layer kept, rebuilt or on the host: by brute force over all counts of the four ways."""
    sizes = (float(low + between + more), float(low + between), float(low), float(low + more))
    costs = (0.0, float(light), float(light + heavy), float(copy))
    for share in (0.1, 0.4, 0.8):
        limit = low + share * (between + more)
        found = fewest(layers, sizes, costs, limit)
        ways = [n for n in product(range(layers + 1), repeat=4) if sum(n) == layers]
        fits = [n for n in ways if sum(c * s for c, s in zip(n, sizes, strict=True)) / layers <= limit + 1e-6]
        best = min(sum(c * s for c, s in zip(n, costs, strict=True)) for n in fits)
        assert found.seconds == pytest.approx(best) and found.none >= found.away
        mine = (found.none - found.away, found.selective, found.full, found.away)
        assert sum(c * s for c, s in zip(mine, costs, strict=True)) == pytest.approx(found.seconds)


def test_nothing_fits_means_all_full() -> None:
    assert fewest(4, (100.0, 80.0, 60.0), (0.0, 1.0, 2.0), 10.0) == Counts(0, 0, 4, 8.0)


DEEP = Configuration(pipeline=4, stages="even")


def deep() -> Strategy:
    one = replace(strategy_of(DEEP), pipeline=1, stages=(4,), micro_batch=1)
    return replace(one, micro_batches=spec_of(DEEP).train.global_batch)


@pytest.mark.parametrize("recompute", ["mixed", "adaptive"])
def test_a_rank_recomputes_only_as_much_as_the_limit_asks_for(recompute: str) -> None:
    spec = spec_of(DEEP)
    machine = read_machine(spec.cluster.model_dump())
    layout = replace(deep(), recompute=recompute)
    tops = {
        tier: memory_ledger(lower(spec, replace(layout, tiers=(tier,) * 4)), machine, 1 << 40).upper
        for tier in ("none", "selective", "full")
    }
    seconds = []
    for share in (1.0, 0.8, 0.5, 0.2, 0.0):
        limit = int(tops["full"] + share * (tops["none"] - tops["full"])) + 1
        tiered = with_tiers(spec, layout, machine, limit)
        chosen, plan, counts = tiered.strategy, tiered.plan, tiered.counts
        assert memory_ledger(plan, machine, limit).upper == tiered.ledger.upper <= limit
        assert [f for proof in verify(plan).values() for f in proof.findings] == []
        seconds.append(counts[0].seconds)
        assert "none" in sentence(counts) or counts[0].none == 0
        if recompute == "adaptive":
            assert chosen.recompute == "adaptive" and len(chosen.tiers) == 4
    assert seconds == sorted(seconds) and seconds[0] == 0.0 < seconds[-1]


@pytest.mark.parametrize("wide", [7, 15])
def test_unlike_layers_of_a_rank_fit_wherever_all_of_them_recomputed_do(wide: int) -> None:
    """A rank's last layer that is much wider than the others is looked for by recomputing one after the other."""
    two = Configuration(pipeline=2, schedule="gpipe")
    spec, layout = spec_of(two), replace(strategy_of(two), stages=(8, 8), recompute="mixed")
    groups = tuple(LayerGroup(count=1, block=Dense(ffn=1024 if n == wide else 16)) for n in range(16))
    spec = replace(spec, model=spec.model.model_copy(update={"layers": groups}))
    machine = read_machine(spec.cluster.model_dump())
    least, most = (
        memory_ledger(lower(spec, replace(layout, tiers=(tier,) * 16)), machine, 1 << 40).upper
        for tier in ("full", "none")
    )
    for share in (0, 4, 10, 12, 16, 18, 19):
        limit = least + share * (most - least) // 20
        assert with_tiers(spec, layout, machine, limit).ledger.upper <= limit


def test_an_adaptive_plan_is_refused_where_even_full_recompute_does_not_fit() -> None:
    """The message has the bytes of the lowest tiers, by component."""
    spec = spec_of(Configuration())
    spec = replace(spec, objective=spec.objective.model_copy(update={"memory_fraction": 0.01}))
    with pytest.raises(TitanError) as caught:
        search(spec)
    (found,) = caught.value.diagnostics
    assert found.code == "T301" and any("holds" in note.text for note in found.notes)


def test_ranks_with_other_tiers_are_put_into_a_plan_as_if_it_was_made_with_them() -> None:
    spec, layers = spec_of(DEEP), 4
    machine = read_machine(spec.cluster.model_dump())
    layout = replace(strategy_of(DEEP), recompute="mixed", tiers=("full",) * layers)
    other = replace(layout, tiers=("selective", "none", "full", "full"))
    assert layout.stages == (1, 1, 1, 1)
    limit = 1 << 40
    whole, part = measured(spec, layout, machine, limit), measured(spec, other, machine, limit, {0, 1})
    found, made = whole.with_ranks(part, {0, 1}), measured(spec, other, machine, limit)
    assert print_plan(found.plan) == print_plan(made.plan)
    assert found.ledger == made.ledger != whole.ledger
