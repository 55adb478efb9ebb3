"""The watermark: tiers by the memory that is there, marks and hysteresis, failed allocations, replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from titan.compiler.lower import lower
from titan.compiler.plan.program import Plan
from titan.compiler.plan.segment import TIERS
from titan.compiler.plan.sizes import liveness
from titan.runtime.data import SyntheticSource
from titan.runtime.interpreter import Executable, usual
from titan.runtime.loopback import LoopbackResult, run_step
from titan.runtime.reading import CpuReading, out_of_memory
from titan.runtime.state import allocate
from titan.runtime.transport.loopback import Loopback
from titan.runtime.transposes import Transpose
from titan.runtime.watermark import HIGH, QUIET, Decision, Replay, Watermark, decision_text, read_decisions

from tests.equivalence.configurations import Configuration, spec_of, strategy_of
from tests.runtime.test_recompute import same_bits, trained

torch.set_num_threads(1)
MODEL = Configuration(pipeline=4, family="dropout")  # four layers


def plan_of(recompute: str) -> Plan:
    spec = spec_of(MODEL)
    one = replace(strategy_of(MODEL), pipeline=1, stages=(4,), recompute=recompute, micro_batches=2)
    return lower(spec, replace(one, micro_batch=spec.train.global_batch // 2))


@dataclass
class Device:
    """A device with a limit on registers, and others who hold some of it."""

    size: int
    others: int = 0

    def limit(self) -> int:
        return self.size

    def used(self, live: int) -> int:
        return live + self.others

    def release(self) -> None:
        pass


def peak(recompute: str) -> int:
    plan = plan_of(recompute)
    return liveness(plan, plan.roles[0]).peak


class Rank:
    """One rank of the adaptive plan on a device, stepped by hand."""

    def __init__(self, device: Device, delay: Callable[[int], None] | None = None, replay: object = None) -> None:
        self.device, self.decisions, self.steps = device, list[Decision](), 0
        plan, world = plan_of("adaptive"), Loopback("cpu")
        source = SyntheticSource(int(plan.setting("model")["vocab"]), seed=3, ignore_fraction=0.2)
        self.state = allocate(plan, 0)
        self.executable = Executable(
            plan, 0, world.transport(0), self.state, source, delay=delay, watermark=partial(self.policy, replay)
        )

    def policy(self, replay: object, executable: Executable) -> Watermark:
        found = usual(executable, self.decisions.append, Replay if replay else Watermark)
        found.reading = self.device
        if isinstance(found, Replay):
            found.follow(replay)  # type: ignore[arg-type]
        return found

    def step(self) -> tuple[str, ...]:
        """Runs a step; the tiers that the frames had in the end."""
        (report,) = run_step([self.executable], self.steps)
        self.steps += 1
        self.peak = report.peak_bytes
        assert self.executable.watermark is not None
        return tuple(self.executable.watermark.forecast.tiers.values())


def rank(tiers: tuple[str, ...]) -> int:
    return sum(TIERS.index(tier) for tier in tiers)


def again(tiers: tuple[str, ...]) -> int:
    """Operator calls that are run again."""
    segments = plan_of("adaptive").segments
    return sum(len(segment.rebuild_body(tier)) for tier in tiers for segment in segments)


def test_nothing_is_recomputed_below_the_high_mark_and_everything_near_the_limit() -> None:
    least, most = peak("full"), peak("none")
    assert rank(Rank(Device(int(most / HIGH) + 1)).step()) == 0
    assert rank(Rank(Device(int(most / HIGH) - 1000)).step()) > 0
    crowded = Rank(Device(int(least / HIGH) - 100))
    assert set(crowded.step()) == {"full"} and least <= crowded.peak < crowded.device.size


def test_less_memory_means_more_recompute_and_never_more_than_there_is() -> None:
    least, most = peak("full"), peak("none")
    recomputed = []
    for share in range(0, 11):
        device = Device(int((most + (least - most) * share / 10) / HIGH) + 1)
        found = Rank(device)
        recomputed.append(again(found.step()))
        assert found.peak <= device.size * HIGH + 1
    assert recomputed == sorted(recomputed) and recomputed[0] == 0 < recomputed[-1]


def test_pressure_in_the_middle_of_a_step_takes_stored_frames_down() -> None:
    """Another allocation of 30% of the budget after the forward of the first layers: the step completes below the
    high mark, with the gradients of a step without pressure."""
    most = peak("none")
    device = Device(int(most / HIGH) + 1)

    def press(position: int) -> None:
        device.others = int(0.3 * device.size) if position > 8 else 0

    pressed = Rank(device, press)
    assert rank(pressed.step()) > 0
    assert pressed.peak + device.others <= HIGH * device.size + 1
    assert {d.reason for d in pressed.decisions} <= {"admission", "pressure"}
    calm = Rank(Device(10 * most))
    calm.step()
    for name, buffer in calm.state.buffers.items():
        assert torch.equal(buffer, pressed.state.buffers[name]), name


def test_tiers_come_back_after_quiet_steps_only() -> None:
    device = Device(int(peak("none") / HIGH) + 1)
    found = Rank(device)
    assert rank(found.step()) == 0
    device.others = int(0.3 * device.size)
    low = rank(found.step())
    device.others = 0
    assert low > 0
    history = [rank(found.step()) for _ in range(QUIET + 1)]
    assert history == [low] * QUIET + [0]
    assert [d.step for d in found.decisions if d.reason == "step"] == [found.steps - 1] * len(
        [d for d in found.decisions if d.reason == "step"]
    )


def test_a_sawtooth_changes_tiers_once() -> None:
    """Pressure that comes and goes every other step: with hysteresis the tiers stay where it once took them."""
    device = Device(int(peak("none") / HIGH) + 1)
    found = Rank(device)
    history = []
    for step in range(2 * QUIET):
        device.others = int(0.3 * device.size) if step % 2 else 0
        history.append(rank(found.step()))
    assert sum(a != b for a, b in pairwise(history)) == 1


@pytest.mark.parametrize("call", range(0, 60, 7))
def test_a_failed_allocation_demotes_and_the_instruction_is_run_again(
    call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator fails in the middle of some operator of a backward: no gradient is lost or added twice."""
    expected = trained(plan_of("none"))
    count = [0]
    original = Transpose.inputs

    def failing(*arguments: object) -> None:
        count[0] += 1
        if count[0] == call + 20:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory")
        original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Transpose, "inputs", failing)
    decisions: list[Decision] = []
    found: LoopbackResult = trained(plan_of("adaptive"), partial(usual, record=decisions.append))
    assert count[0] >= call + 20
    assert {d.reason for d in decisions} <= {"failure"} and bool(decisions) == (call < 49)  # then no frame is left
    assert same_bits(found, expected)


def test_a_failure_that_nothing_can_relieve_is_raised() -> None:
    plan = plan_of("none")
    with pytest.raises(RuntimeError, match="can't allocate"):
        trained_with_failure(plan)
    assert not out_of_memory(RuntimeError("shape mismatch")) and out_of_memory(MemoryError())


def trained_with_failure(plan: Plan) -> None:
    def fail(position: int) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    world, source = Loopback("cpu"), SyntheticSource(int(plan.setting("model")["vocab"]), seed=3)
    run_step([Executable(plan, 0, world.transport(0), allocate(plan, 0), source, delay=fail)], 0)


def test_decisions_are_recorded_and_can_be_followed(tmp_path: Path) -> None:
    device = Device(int(peak("none") / HIGH) + 1)
    found = Rank(device)
    history = []
    for others in (0.0, 0.3, 0.1, 0.0):
        device.others = int(others * device.size)
        history.append(found.step())
    file = tmp_path / "tiers.jsonl"
    file.write_text("\n".join(map(decision_text, found.decisions)))
    again = Rank(Device(1 << 60), replay=read_decisions(file))
    assert [again.step() for _ in range(4)] == history
    for name, buffer in found.state.buffers.items():
        assert torch.equal(buffer, again.state.buffers[name])


def test_a_rank_without_a_limit_of_its_own_reads_the_ledger() -> None:
    reading = CpuReading(1000, 300)
    assert (reading.limit(), reading.used(50)) == (1000, 350)
