"""What the search moves to the host: nothing where all fits, else as little as it takes, and only as far as it goes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from titan.compiler.cost.machine import read_machine
from titan.compiler.cost.memory import memory_ledger
from titan.compiler.cost.simulate import simulate
from titan.compiler.lower import lower
from titan.compiler.plan.host import host_memory
from titan.compiler.plan.sizes import Sizes
from titan.compiler.plan.text import print_plan
from titan.compiler.search import tiers
from titan.compiler.search.measured import Measured, measured
from titan.compiler.search.offload import least_layers
from titan.compiler.search.search import search
from titan.compiler.search.tiers import sentence, with_tiers
from titan.compiler.spec.resolve import resolve
from titan.compiler.spec.schema import Spec
from titan.compiler.spec.wishes import Wish
from titan.compiler.strategy import Strategy
from titan.compiler.verify.proofs import verify
from titan.grammar.diagnostics import TitanError
from titan.grammar.parser import parse

from tests.compiler.search.specs import least_memory

LAYERS = 6


def spec_of(memory: str, host: str = "256 GiB", link: str = "64 GB/s", parallel: str = "") -> Spec:
    """Two devices with little memory and a quick or a slow way to their host."""
    text = f"""import models.llama
import clusters.nvidia
model = llama.llama3_8b with {{ layers = {LAYERS} * dense {{ ffn = 14336 }}, vocab = 32000 }}
cluster = nvidia.dgx_h100 with {{
    devices_per_node = 2, device = nvidia.h100_sxm with {{ memory = {memory} }}
    host_memory = {host}, host_link = link {{ bandwidth = {link}, latency = 10 us }}
}}
train {{ sequence = 4Ki, global_batch = 16, precision = bf16, data = synthetic(100) }}
parallel {{ data = 2
    {parallel} }}
"""
    return resolve(parse(text, "away.titan"), Path())


@pytest.fixture(scope="module")
def too_little() -> str:
    """Memory of a device in which no plan fits that keeps everything there, however it is sharded."""
    spec = spec_of("80 GiB")
    least = least_memory(spec, micro_batch=1, micro_batches=8, stages=(LAYERS,))
    return f"{int(least / spec.objective.memory_fraction / 2**20) - 1} MiB"


def test_nothing_moves_where_everything_fits() -> None:
    assert search(spec_of("60 GiB")).strategy.offload == "none"


def test_state_moves_where_nothing_else_makes_it_fit(too_little: str) -> None:
    spec = spec_of(too_little)
    found = search(spec)
    assert found.strategy.offload in ("optimizer", "both") and found.ledger.verdict == "fits"
    assert all(proof.ok for proof in verify(found.plan).values())
    with pytest.raises(TitanError) as refused:
        search(replace(spec, cluster=spec.cluster.model_copy(update={"host_memory": None})))
    assert refused.value.diagnostics[0].code == "T301"


def test_host_memory_has_a_limit_too(too_little: str) -> None:
    with pytest.raises(TitanError) as refused:
        search(spec_of(too_little, host="4 GiB"))
    assert refused.value.diagnostics[0].code == "T301"


def full(spec: Spec) -> Strategy:
    return Strategy(data=2, zero=1, recompute="full", micro_batch=4, micro_batches=2, stages=(LAYERS,))


def test_no_fewer_layers_would_do() -> None:
    spec = spec_of("80 GiB", link="400 GB/s")
    machine, plain = read_machine(spec.cluster.model_dump()), replace(full(spec), recompute="none")
    most, least = (
        memory_ledger(lower(spec, replace(plain, offload=o)), machine).upper for o in ("none", "activations")
    )
    limit = (most + least) // 2
    found = least_layers(spec, full(spec), machine, limit)
    assert found is not None
    strategy, own = found
    assert memory_ledger(own.plan, machine, limit) == own.ledger and own.ledger.verdict == "fits"
    assert print_plan(own.plan) == print_plan(lower(spec, strategy))
    fewer = replace(strategy, offloaded=tuple(range((len(strategy.offloaded) or LAYERS) - 1)))
    fewer = fewer if fewer.offloaded else replace(fewer, offload="none")
    assert memory_ledger(lower(spec, fewer), machine, limit).verdict != "fits"


def test_layers_are_kept_rebuilt_or_offloaded_by_price() -> None:
    """Copies that hide are cheaper than to rebuild all, and for the last layer to rebuild a part is enough: the plan is
    proven, fits, and is faster than with recompute alone. Nothing is on the host where its link is slow."""
    spec = spec_of("80 GiB", link="200 GB/s")
    machine, layout = read_machine(spec.cluster.model_dump()), replace(full(spec), recompute="none")
    tops = [
        memory_ledger(lower(spec, replace(layout, **change)), machine).upper
        for change in ({}, {"offload": "activations"}, {"recompute": "full"})
    ]
    limit = (min(tops) * 3 + tops[0]) // 4
    tiered = with_tiers(spec, layout, machine, limit, host="activations")
    assert tiered.ledger.upper <= limit and tiered.strategy.layers_on_host
    assert tiered.counts[0].selective and set(tiered.strategy.tiers) == {"none", "selective"}
    assert "on the host" in sentence(tiered.counts)
    assert all(proof.ok for proof in verify(tiered.plan).values())
    alone = with_tiers(spec, layout, machine, limit)
    assert simulate(tiered.plan).step < simulate(alone.plan).step
    slow = spec_of("80 GiB", link="1 GB/s")
    found = with_tiers(slow, layout, read_machine(slow.cluster.model_dump()), limit, host="activations")
    assert found.strategy.layers_on_host == 0


def test_what_was_measured_for_tiers_is_not_measured_again_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("80 GiB", link="1 GB/s")  # to rebuild is cheaper
    machine, layout = read_machine(spec.cluster.model_dump()), replace(full(spec), recompute="full")
    tops = [measured(spec, layout.but(recompute=r), machine, 1).ledger.upper for r in ("none", "full")]
    limit = (tops[0] + 3 * tops[1]) // 4
    first = with_tiers(spec, layout, machine, limit)
    plain = replace(layout, recompute="none")
    afresh = with_tiers(spec, plain, machine, limit, host="activations")
    done: list[Strategy] = []

    def counted(spec: Spec, strategy: Strategy, *rest: Any) -> Measured:
        done.append(strategy)
        return measured(spec, strategy, *rest)

    monkeypatch.setattr(tiers, "measured", counted)
    again = with_tiers(spec, plain, machine, limit, host="activations", tried=first.tried)
    assert [s.offload for s in done] == ["activations"]
    assert (again.strategy, again.ledger, again.counts) == (afresh.strategy, afresh.ledger, afresh.counts)
    assert replace(again.plan, settings=()) == replace(afresh.plan, settings=())


def test_a_quick_link_hides_its_copies_and_a_slow_one_does_not() -> None:
    """Against the same plan without offload: its step and what it must move at least."""
    plain = simulate(lower(spec_of("80 GiB"), replace(full(spec_of("80 GiB")), recompute="none"))).step
    away = replace(full(spec_of("80 GiB")), recompute="none", offload="activations", offloaded=(0, 1, 2))
    quick = lower(spec_of("80 GiB", link="2 TB/s"), away)
    assert plain <= simulate(quick).step < 1.01 * plain
    slow = lower(spec_of("80 GiB", link="4 GB/s"), away)
    one_batch = host_memory(slow.roles[0], Sizes(slow))["activations"]
    assert simulate(slow).step > 2 * one_batch / 4  # ns of two micro-batches one way at full rate


def barely_enough(too_little: str, *offload: str) -> Spec:
    """Memory for the thriftiest plan that stays on the device, as expected but not at its worst."""
    spec = spec_of(f"{int(too_little.split()[0]) + 100} MiB", parallel="micro_batch = 1")
    return replace(spec, parallel=replace(spec.parallel, offload=Wish("in", offload)))


def test_a_plan_at_risk_is_found_where_closed_forms_say_that_a_faster_one_fits(too_little: str) -> None:
    """What that one holds beyond the limit is to be saved, not what it would at its worst."""
    found = search(barely_enough(too_little, "none"))
    assert (found.ledger.verdict, found.strategy.zero) == ("at risk", 3)


def test_what_fits_with_state_on_the_host_is_better_than_what_may_not_fit(too_little: str) -> None:
    found, here = (search(barely_enough(too_little, "none", *more)) for more in (("optimizer",), ()))
    assert (here.ledger.verdict, found.ledger.verdict) == ("at risk", "fits")
    assert found.strategy.offload != "none" and found.timeline.step < here.timeline.step


def test_state_moves_where_full_memory_costs_more_than_its_copies(too_little: str) -> None:
    """A plan fits on the device, with recompute; half of its memory is optimizer state that waits for its update."""
    spec = spec_of(f"{int(too_little.split()[0]) + 1_620} MiB", parallel="micro_batch = 1")
    found, here = (
        search(replace(spec, parallel=replace(spec.parallel, offload=Wish("in", words))))
        for words in (("none", "optimizer"), ("none",))
    )
    assert here.ledger.verdict == "fits" and here.strategy.recompute != "none"
    assert found.strategy.offload == "optimizer" and found.timeline.step < 0.97 * here.timeline.step
    assert found.bound <= found.timeline.seconds
    why = {key: text for key, _, text in found.strategy.reasons}["offload"]
    assert f"{here.timeline.seconds / found.timeline.seconds - 1:.1%} more" in why
