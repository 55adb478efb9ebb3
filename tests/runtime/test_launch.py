"""Whole processes: ranks that are killed, interrupts, worlds that others have made, and what listens meanwhile."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from titan.runtime.log import read_log

from tests.runtime.small_runs import environment, start, write_spec

LONG = 100_000  # steps that no test waits for


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Until the log has the step."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        if process.poll() is not None:
            raise AssertionError(process.communicate())
        path = folder / "log.jsonl"
        if path.exists() and any(r["step"] >= step for r in read_log(path)):
            return
        time.sleep(0.02)
    process.kill()
    raise AssertionError("no step within 30 seconds")


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_killed_rank_ends_the_run_with_one_error(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, steps=LONG)
    with start("run", str(spec), "--log-dir", str(tmp_path / "log"), "--json") as process:
        wait_for_step(tmp_path / "log", 3, process)
        ranks = children(process.pid)
        os.kill(ranks[1], signal.SIGKILL)
        killed = time.monotonic()
        out, err = process.communicate(timeout=20)
        assert time.monotonic() - killed < 3
    assert process.returncode == 1
    assert len(re.findall(r"error T\d{3}", err)) == 1
    assert re.search(
        r"error T616: rank 1 failed: it was killed by SIGKILL\n  note: it was at step \d+, instruction \d+ `", err
    )
    assert "Traceback" not in err
    assert json.loads(out)["diagnostics"][0]["code"] == "T616"
    assert not any(map(alive, ranks))


def test_ranks_end_with_a_killed_launcher(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, steps=LONG)
    with start("run", str(spec), "--log-dir", str(tmp_path / "log")) as process:
        wait_for_step(tmp_path / "log", 1, process)
        ranks = children(process.pid)
        assert len(ranks) == 2
        process.kill()
        process.wait()
        until = time.monotonic() + 3
        while any(map(alive, ranks)) and time.monotonic() < until:
            time.sleep(0.02)
        assert not any(map(alive, ranks))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_finishes_the_step_and_saves(number: signal.Signals, tmp_path: Path) -> None:
    spec = write_spec(tmp_path, steps=LONG)
    with start("run", str(spec), "--log-dir", str(tmp_path / "log"), "--json") as process:
        wait_for_step(tmp_path / "log", 2, process)
        os.killpg(process.pid, number)  # as a terminal does: the launcher and all ranks
        out, err = process.communicate(timeout=20)
    result = json.loads(out)
    assert process.returncode == 128 + number and result["stopped"], err
    (saved,) = (tmp_path / "log" / "checkpoints").iterdir()
    assert saved.name == f"step-{result['steps']:08d}"
    steps = [r["step"] for r in read_log(tmp_path / "log" / "log.jsonl") if r["event"] == "step"]
    assert steps == list(range(1, result["steps"] + 1))


def test_a_second_interrupt_stops_at_once(tmp_path: Path) -> None:
    """The first is held up by ranks that are stopped, so no step can end."""
    spec = write_spec(tmp_path, steps=LONG)
    with start("run", str(spec), "--log-dir", str(tmp_path / "log")) as process:
        wait_for_step(tmp_path / "log", 1, process)
        ranks = children(process.pid)
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None
        os.kill(process.pid, signal.SIGINT)
        process.communicate(timeout=5)
    assert process.returncode == 130
    assert not any(map(alive, ranks))


def test_nothing_listens_beyond_loopback(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, steps=LONG)
    with start("run", str(spec), "--log-dir", str(tmp_path / "log")) as process:
        try:
            wait_for_step(tmp_path / "log", 1, process)
            listening = [found for p in (process.pid, *children(process.pid)) for found in listeners(p)]
        finally:
            process.terminate()
            process.communicate(timeout=20)
    assert listening, "the ranks' own sockets were expected here"
    assert {address for address, _ in listening} == {"127.0.0.1"}


def listeners(process: int) -> list[tuple[str, int]]:
    """(address, port) of the listening TCP sockets that a process holds."""
    held = set()
    for handle in Path(f"/proc/{process}/fd").iterdir():
        try:
            held.add(os.readlink(handle))
        except OSError:
            continue
    found = []
    for table, width in (("tcp", 8), ("tcp6", 32)):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in held:
                address, _, port = fields[1].partition(":")
                found.append((plain(address) if width == 8 else address, int(port, 16)))
    return found


def plain(address: str) -> str:
    return socket.inet_ntoa(bytes.fromhex(address)[::-1])


def test_joins_a_torchrun_world(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, "data = 2", steps=3)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "titan.compiler.cli", "run", str(spec), "--log-dir", str(tmp_path / "log"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60)
    assert done.returncode == 0, done.stderr
    joined = json.loads(done.stdout)
    with start("run", str(spec), "--log-dir", str(tmp_path / "own"), "--json") as process:
        own = json.loads(process.communicate(timeout=30)[0])
    assert joined["steps"] == own["steps"] == 3 and joined["ranks"] == 2
    assert (joined["first_loss"], joined["final_loss"]) == (own["first_loss"], own["final_loss"])


def test_one_failing_rank_of_a_joined_world_ends_the_other(tmp_path: Path) -> None:
    """Rank 1 has another plan."""
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        start(
            "run",
            str(write_spec(tmp_path, "data = 2", seed=seed)),
            "--log-dir",
            str(tmp_path / "log"),
            RANK=rank,
            **world,
        )
        for rank, seed in (("0", 1), ("1", 2))
    ]
    outputs = [rank.communicate(timeout=40) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert "error T615: rank 1 failed: rank 1 has plan" in outputs[1][1]
    assert "error" not in outputs[0][1]


def test_a_world_of_another_size_is_refused(tmp_path: Path) -> None:
    with start("run", str(write_spec(tmp_path)), RANK="0", WORLD_SIZE="3") as process:
        _, err = process.communicate(timeout=30)
    assert process.returncode == 2 and "error T609" in err


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
