"""What is measured in the time that there is, by a clock that is set by hand."""

from __future__ import annotations

import pytest
from titan.compiler.profile.pace import Pace, Share, _repeated
from titan.compiler.profile.probes import probes

PROBES = probes(4, "cpu", 8 << 30)


def timed(factors: dict[str, float], room: float) -> tuple[list[int], float]:
    """Steps of the probes, and when they have ended, where a unit of work takes so long in each precision."""
    now = 0.0
    pace, found = Pace(PROBES, room, lambda: now), []
    for probe in PROBES:
        steps = pace.steps(probe)
        found.append(steps)
        seconds = factors[probe.precision] * _repeated(probe, steps) if steps else 0.0
        now += seconds
        pace.done(probe, steps, seconds)
    return found, now


def whole(factors: dict[str, float]) -> float:
    return sum(factors[p.precision] * _repeated(p, p.steps) for p in PROBES)


def test_where_there_is_time_all_steps_are_timed() -> None:
    factors = {"fp32": 1.0, "bf16": 2.0}
    found, end = timed(factors, 1.5 * whole(factors))
    assert found == [p.steps for p in PROBES] and end == pytest.approx(whole(factors))


@pytest.mark.parametrize("share", [0.9, 0.6, 0.3])
def test_a_slow_machine_is_done_in_time_with_fewer_steps_and_without_the_largest(share: float) -> None:
    """The first probe has all its steps, since nothing is known before it."""
    factors = {"fp32": 1.0, "bf16": 1.0}
    room = share * whole(factors)
    found, end = timed(factors, room)
    assert end <= room * 1.001
    assert any(steps < probe.steps for probe, steps in zip(PROBES, found, strict=True))
    done, left_out = ([p.work for p, n in zip(PROBES, found, strict=True) if (n > 0) == some] for some in (True, False))
    assert not left_out or min(left_out) >= max(done)
    assert all(n >= p.least for p, n in zip(PROBES, found, strict=True) if n)


def test_what_is_slow_in_one_precision_is_known_after_its_first_probe() -> None:
    """Where the time is for half of that precision, it has fewer steps or is left out: the other one is all measured,
    nearly all of it in full."""
    factors = {"fp32": 1.0, "bf16": 20.0}
    plain = whole({"fp32": 1.0, "bf16": 0.0})
    room = plain + (whole(factors) - plain) / 2
    found, end = timed(factors, room)
    plainly, slowly = ([(p, n) for p, n in zip(PROBES, found, strict=True) if p.precision == x] for x in factors)
    assert all(plain_steps := [n for _, n in plainly]) and not all(n for _, n in slowly)
    assert sum(plain_steps) > 0.9 * sum(p.steps for p, _ in plainly)
    assert end <= room * 1.001 and sum(n > 0 for _, n in slowly) >= 3


def test_a_share_of_repetitions_follows_the_time_that_is_left() -> None:
    now = 0.0
    share = Share(10, 30.0, lambda: now)
    parts = []
    for _ in range(10):
        parts.append(share.next())
        now += 6.0 * parts[-1]  # with all repetitions they would take 60 seconds
    assert parts[0] == 1.0 and all(p == pytest.approx(24 / 9 / 6) for p in parts[1:]) and now == pytest.approx(30.0)
    now = 0.0
    plenty = Share(3, 100.0, lambda: now)
    for _ in range(3):
        assert plenty.next() == 1.0
        now += 6.0
    assert Share(1, 0.0, lambda: 5.0).next() == 1.0
