"""A sample of the mutants: whatever execution shows to be wrong, the verifier refuses, naming the place."""

from __future__ import annotations

import random

import pytest

from tests.benchmarks.mutants import OPERATORS, execute, judge, report, sample
from tests.compiler.verify.tiny import plan


@pytest.mark.parametrize("name", ["zero", "square", "tied", "heads", "ring", "sequence"])
def test_every_killable_mutant_is_refused_by_name(name: str) -> None:
    expected = execute(plan(name))
    chosen = random.Random(name).sample(sample(name, 1, seed=4), 25)
    verdicts = [judge(name, expected, mutant) for mutant in chosen]
    found = report(verdicts, 0.0)
    assert found["missed"] == [] and found["unnamed"] == []
    assert sum(v.killable for v in verdicts) > 10  # execution does see most of them


def test_an_unbroken_plan_executes_to_the_same_numbers_twice() -> None:
    from tests.benchmarks.mutants import difference

    assert difference(execute(plan("square")), plan("square")) == ""


def test_there_are_many_ways_to_break_a_plan() -> None:
    assert len(OPERATORS) >= 25
