"""Fixtures for all tests: golden files, and one thread per process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported anywhere

settings.register_profile("same", derandomize=True, deadline=None)  # two runs of the suite test the same
settings.load_profile("same")

GOLDEN = Path(__file__).with_name("golden")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew; the diff is the review")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--update-golden") and os.environ.get("CI"):
        raise pytest.UsageError("--update-golden is refused where CI is set: golden files are written by people")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str], Callable[[str], None]]:
    """`golden("errors/unit.expect")(text)` compares `text` with `tests/golden/errors/unit.expect`."""
    update = bool(request.config.getoption("--update-golden"))

    def named(name: str) -> Callable[[str], None]:
        file = GOLDEN / name

        def compare(text: str) -> None:
            text = text.rstrip("\n") + "\n"
            if update:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
                return
            if not file.exists():
                pytest.fail(f"{file.relative_to(GOLDEN.parent)} does not exist; `pytest --update-golden` writes it")
            assert text == file.read_text(encoding="utf-8"), f"differs from {file.relative_to(GOLDEN.parent)}"

        return compare

    return named
