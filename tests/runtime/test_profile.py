"""Measuring processes, and the command over them on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from titan.compiler.pipeline import check_spec
from titan.grammar.diagnostics import TitanError
from titan.runtime.devices import choose_device
from titan.runtime.profile import communication
from titan.runtime.profile.pool import Member, Pool

COMMAND = [sys.executable, "-m", "titan.compiler.cli", "profile"]


def fail(member: Member) -> int:
    if member.rank == 1:
        raise ValueError("no such luck")
    return member.rank


def test_a_failure_in_one_process_is_told_and_others_end() -> None:
    with pytest.raises(TitanError, match="process 1 failed: ValueError: no such luck"), Pool(2) as pool:
        pool.call(fail)
    assert all(not process.is_alive() for process in pool._processes)


def test_what_is_timed_takes_longer_when_there_is_more_of_it() -> None:
    with Pool(2) as pool:
        found = [pool.call(communication.time_collective, "all_gather", 2, size, 3) for size in (1 << 10, 1 << 24)]
        small, large = (sum(seconds for seconds, _ in ranks) / 2 for ranks in found)
        assert small < large
        assert all(0 < asking < large for ranks in found for _, asking in ranks)
        assert large > (1 << 23) / 50e9  # half the bytes cross; no loopback moves 50 GB/s
        there = pool.call(communication.time_transfer, 1 << 24, 2)
        rounds = (*there[0], *there[1])  # differences of two loops: on a busy machine one may be below 0
        assert max(rounds) > (1 << 24) / 50e9


def test_a_quick_profile_writes_a_cluster_that_a_spec_imports(tmp_path: Path) -> None:
    output = tmp_path / "machine.titan"
    command = [*COMMAND, "--quick", "--ranks", "2", "--device", "cpu", "-o", str(output), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ranks"] == 2 and found["peak_flops"]["f32"] > 1e8 and found["memory_bandwidth"] > 1e8
    assert 0 < found["figures"]["instruction_seconds"] < 1e-2
    spec = tmp_path / "spec.titan"
    spec.write_text("""import machine
import models.tiny
model = tiny.llama
cluster = machine.here
train { sequence = 64, global_batch = 4, precision = fp32, steps = 4, optimizer = adamw { learning_rate = 1e-3 }
    data = synthetic(256) }
""")
    cluster = check_spec(spec).cluster
    assert cluster.cores == len(os.sched_getaffinity(0)) and len(cluster.curves) == found["curves"]
    assert {
        "linear_forward",
        "linear_backward_weight",
        "attention_forward",
        "optimizer_step",
        "all_reduce_2",
        "send",
    } <= {*cluster.curves}


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Processes started here can be interrupted, also where the tests are a shell's background job: such a job ignores
    interrupts, and what it starts does as well."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_it_and_writes_nothing(tmp_path: Path) -> None:
    command = [*COMMAND, "-o", str(tmp_path / "machine.titan"), "--device", "cpu"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            process.stderr.readline()  # it measures
            started = time.monotonic()
            process.send_signal(signal.SIGINT)
            rest = process.communicate(timeout=20)[1]
            took = time.monotonic() - started
        finally:
            process.kill()  # nothing is left measuring when this fails
    assert process.returncode == 130 and "Traceback" not in rest and "interrupted" in rest
    assert took < 10
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["machine.txt", "my-machine.titan", "absent/machine.titan"])
def test_files_that_no_spec_could_import_are_refused_before_measuring(tmp_path: Path, name: str) -> None:
    done = subprocess.run([*COMMAND, "-o", str(tmp_path / name)], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "T603" in done.stderr


def test_one_rank_is_measured_by_itself(tmp_path: Path) -> None:
    """There is nobody to meet: what two ranks would be asked is not."""
    output = tmp_path / "machine.titan"
    command = [*COMMAND, "--quick", "--ranks", "1", "--device", "cpu", "-o", str(output), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"] == 1 and "all_reduce" not in output.read_text()


def test_devices_that_are_not_here_are_refused_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(TitanError, match="each of the 4 ranks on this machine a GPU of its own; PyTorch sees 2"):
        choose_device("cuda", 4)
    assert choose_device("auto", 4) == choose_device("cpu", 4) == "cpu"
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    with pytest.raises(TitanError, match="NCCL"):
        choose_device("cuda", 2)
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [*COMMAND, "--device", "cuda", "-o", str(tmp_path / "machine.titan")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=hidden)
    assert done.returncode == 2 and done.stderr.startswith("error T619") and not [*tmp_path.iterdir()]
