"""What a user sees of a wrong spec, as golden files; and that no spec whatever makes anything but diagnostics."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from titan.compiler.spec.resolve import resolve
from titan.grammar.diagnostics import TitanError, render
from titan.grammar.parser import parse
from titan.grammar.sources import library_path

from tests.compiler.spec.writing import problems

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests/golden/spec"


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.titan")))
def test_pictures(name: str, golden: Callable[[str], Callable[[str], None]]) -> None:
    text = (GOLDEN / f"{name}.titan").read_text()
    drawn = "\n".join(render(found, {"test.titan": text}) for found in problems(text, GOLDEN))
    golden(f"spec/{name}.expect")(drawn.replace(str(library_path()), "LIBRARY"))


def test_mutated_specs_make_diagnostics_and_nothing_else() -> None:
    texts = [path.read_text() for path in sorted((ROOT / "examples").glob("*.titan"))]
    words = re.compile(r'\w+|"[^"]*"|\s+|.')
    pool = [word for text in texts for word in words.findall(text) if not word.isspace()]
    pool += ["0", "-1", "1e30", "none", "[", "{", "}", "with", "in", ">=", "99999999999", "1 / 3", "GiB", "moe"]
    chance, fine = random.Random(7), 0
    for _ in range(600):
        mutant = words.findall(chance.choice(texts))
        for _ in range(chance.choice([1, 1, 2, 4])):
            place = chance.randrange(len(mutant))
            mutant[place : place + chance.randrange(2)] = [chance.choice(pool)] * chance.randrange(2)
        try:
            resolve(parse("".join(mutant), "test.titan"), ROOT)
            fine += 1
        except TitanError as error:
            assert all(found.code and found.message and render(found, {}) for found in error.diagnostics)
    assert 20 < fine < 580  # the mutations neither spare nor break everything
