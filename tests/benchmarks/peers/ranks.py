"""The processes of one contender: started together, idle between their turns, asked for steps."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import IO, Any

from tests.benchmarks.peers.contenders import ROOT, Contender
from tests.benchmarks.peers.gate import MARK


class Failed(Exception):
    """A contender that did not start, died or took too long; the text is the last line that it wrote."""


class Ranks:
    def __init__(self, contender: Contender, folder: Path) -> None:
        self.contender = contender
        self._folder = folder
        folder.mkdir(parents=True)
        port = str(_free_port())
        self._processes = [self._start(rank, port) for rank in range(contender.ranks)]
        self._lines = [_collected(process.stdout) for process in self._processes]

    def _start(self, rank: int, port: str) -> subprocess.Popen[str]:
        here = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": self.contender.ranks,
            "LOCAL_WORLD_SIZE": self.contender.ranks,
        }
        environment = os.environ | self.contender.environment | {name: str(value) for name, value in here.items()}
        environment |= {
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "WANDB_MODE": "disabled",
            "GLOO_SOCKET_IFNAME": "lo",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "MEET": str(self._folder / "meet"),
            "PYTHONPATH": self.contender.path,
        }
        with (self._folder / f"{rank}.err").open("w") as errors:
            return subprocess.Popen(
                self.contender.command(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                cwd=ROOT if self.contender.ours else self._folder,
            )

    def ready(self, seconds: float = 240.0) -> dict[str, Any]:
        """What rank 0 says of itself, when all ranks stand before their first step."""
        return self._answers(seconds)[0]

    def steps(self, count: int, seconds: float = 120.0) -> tuple[list[float], float]:
        """Seconds of each step, that of the slowest rank, and CPU seconds of all ranks together."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{count}\n")
            process.stdin.flush()
        answers = self._answers(seconds)
        return [max(times) for times in zip(*(a["seconds"] for a in answers))], sum(a["cpu"] for a in answers)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def _answers(self, seconds: float) -> list[dict[str, Any]]:
        deadline = time.monotonic() + seconds
        return [self._answer(rank, process, deadline) for rank, process in enumerate(self._processes)]

    def _answer(self, rank: int, process: subprocess.Popen[str], deadline: float) -> dict[str, Any]:
        try:
            line = self._lines[rank].get(timeout=max(0.1, deadline - time.monotonic()))
        except queue.Empty:
            line = ""
        if not line:
            raise Failed(self._complaint(rank, process))
        answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
        return answer

    def _complaint(self, rank: int, process: subprocess.Popen[str]) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.5)
        if process.poll() is None:
            return f"rank {rank} gave no answer in time"
        lines = (self._folder / f"{rank}.err").read_text(errors="replace").strip().splitlines()
        errors = [line.strip() for line in lines if "Error: " in line]
        return (errors or lines or [f"rank {rank} ended"])[-1][:200]


def _collected(stream: IO[str] | None) -> queue.Queue[str]:
    """The answers among the lines of a stream, as they come; an empty one at its end."""
    assert stream is not None
    lines: queue.Queue[str] = queue.Queue()

    def collect() -> None:
        for line in stream:
            if line.startswith(MARK):
                lines.put(line)
        lines.put("")

    threading.Thread(target=collect, daemon=True).start()
    return lines


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
