"""Every pair of choices once: loopback equals one process equals autograd, in float64 to 1e-9."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

import pytest
import torch
from titan.compiler.lower import lower
from titan.compiler.spec.legality import legal
from titan.compiler.spec.parallel import CHOICES

from tests.equivalence import comparison
from tests.equivalence.configurations import (
    SAMPLED,
    Configuration,
    cells,
    feasible_pairs,
    meshes,
    pairs,
    pairwise,
    possible,
    spec_of,
    strategy_of,
)

torch.set_num_threads(1)
SAMPLE = pairwise(150)


@pytest.mark.parametrize("configuration", SAMPLE, ids=str)
def test_a_plan_equals_one_process(configuration: Configuration) -> None:
    assert comparison.mismatches(configuration) == []


@pytest.mark.parametrize("configuration", [c for c in SAMPLE if c.schedule in CHOICES["schedule"].now], ids=str)
def test_a_plan_passes_every_proof(configuration: Configuration) -> None:
    assert comparison.unproven(lower(spec_of(configuration), strategy_of(configuration))) == []


def test_the_sample_has_every_pair_and_only_legal_layouts() -> None:
    assert len(SAMPLE) >= 150 and len(set(SAMPLE)) == len(SAMPLE)
    assert not feasible_pairs(SAMPLED) - set().union(*map(pairs, SAMPLE))
    for configuration in SAMPLE:
        if configuration.schedule in CHOICES["schedule"].now:
            assert legal(spec_of(configuration), strategy_of(configuration)) == (), str(configuration)


def test_feasible_pairs_are_those_of_the_grid() -> None:
    """Against the whole grid of small meshes, written out."""
    degrees, ranks = (1, 2), 2
    everything = {c for mesh in meshes(degrees, ranks) for c in cells(mesh)}
    assert all(possible(c) for c in everything)
    assert feasible_pairs(degrees, ranks) == set().union(*map(pairs, everything))


def test_a_difference_is_seen() -> None:
    """The comparison itself: one element of one gradient changed by a part in 10^8, and a wrong learning rate."""
    configuration = Configuration(tensor=2, data=2)
    spec = spec_of(configuration)
    _, single = comparison.plans(spec, strategy_of(configuration))
    one = comparison.train_plan(single, spec)
    oracle = comparison.train_reference(single, spec, one.initial)
    assert comparison.differences(one, oracle) == []
    random = Random(0)
    for name, step in product(("layers.0.attn.k.weight", "final_norm.weight", "embed.weight"), (0, 1)):
        changed = {n: g.clone() for n, g in one.gradients[step].items()}
        flat = changed[name].view(-1)
        largest = int(flat.abs().argmax()) if random.random() < 0.5 else 0
        flat[largest] += 1e-8 * float(flat.abs().max())
        gradients = tuple(changed if s == step else g for s, g in enumerate(one.gradients))
        found = comparison.differences(replace(one, gradients=gradients), oracle)
        assert len(found) == 1 and found[0].startswith(f"step {step} gradient {name} off")
    moved = {n: p + 1e-10 * (n == "final_norm.weight") for n, p in one.parameters.items()}
    assert len(comparison.differences(replace(one, parameters=moved), oracle)) == 0
    moved = {n: p + 1e-8 * (n == "final_norm.weight") for n, p in one.parameters.items()}
    assert len(comparison.differences(replace(one, parameters=moved), oracle)) == 1
    assert len(comparison.differences(replace(one, losses=(one.losses[0], one.losses[1] * 1.0000001)), oracle)) == 1
