"""Live bytes over calls in rounds of which one is walked, against a walk of all calls."""

from __future__ import annotations

import random

import pytest
from titan.compiler.plan.calls import Calls
from titan.compiler.plan.rounds import Repeats, repeats
from titan.compiler.plan.storages import Profile


def in_rounds(chance: random.Random, level: bool) -> tuple[list[str], dict[str, Profile]]:
    """Calls of blocks before, in and after rounds that leave as many bytes as they find, or more; and the blocks."""
    before, own, after = (
        [f"{part}{n}" for n in range(chance.randrange(1, 6))] for part in ("before", "round", "after")
    )
    changes = {name: chance.randrange(-9, 10) for name in (*before, *own, *after)}
    changes[own[-1]] += (0 if level else 3) - sum(changes[name] for name in own)
    profiles = {
        name: Profile(change, chance.randrange(20), chance.randrange(20), chance.randrange(3))
        for name, change in changes.items()
    }
    cut = chance.randrange(len(own))
    rounds = own * chance.randrange(10, 20)
    return [*before, *own[cut:], *rounds, *own[:cut], *after], profiles


@pytest.mark.parametrize("level", [True, False])
def test_one_of_equal_rounds_reaches_what_all_reach(level: bool) -> None:
    for seed in range(200):
        called, profiles = in_rounds(random.Random(seed), level)
        calls = Calls(profiles)
        short = calls.once(called)
        one, whole = calls.walked(short), calls.walked(called)
        assert (one.peak, one.registers, one.workspace) == (whole.peak, whole.registers, whole.workspace), seed
        assert one.curve[-1] == whole.curve[-1]
        assert (len(short) < len(called)) == level


def test_repeats_reach_as_far_as_names_do() -> None:
    assert repeats([*"xy", *"abc" * 5, *"ab", *"z"]) == Repeats(2, 19, 3)
    assert repeats([*"ababab"]) == Repeats(0, 6, 2)
    assert repeats([*"abcd"]) is repeats([]) is None
