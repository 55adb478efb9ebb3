"""Situations from public reports about going on from a checkpoint; each test bears the id of its case."""

from __future__ import annotations

import hashlib
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from titan.runtime.checkpoint import Saved, load

PIECES, ELEMENTS = 64, 1 << 19  # 128 MiB of float32 in pieces of 2 MiB


def _resident(key: str) -> int:
    """Bytes: `VmRSS` now, `VmHWM` at most since it was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def _restore(folder: Path, pipe: Connection) -> None:
    """Fills buffers that are there already, and tells how much more memory that took at its highest."""
    name = "rank-00000.safetensors"
    content = (folder / name).read_bytes()
    files = {name: (hashlib.sha256(content).hexdigest(), len(content))}
    del content
    buffers = {f"o.{n}": torch.zeros(ELEMENTS) for n in range(PIECES)}
    state: Any = SimpleNamespace(rank=0, buffers=buffers, updates=0)
    for tensor in buffers.values():
        tensor.fill_(1.0)  # pages that nothing was written to are not there yet
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    load(Saved(folder, 3, 3, "", files), state)
    pipe.send((_resident("VmHWM") - before, [float(t[0]) for t in buffers.values()], state.updates))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not tell its peak")
def test_S_MEM_14_restoring_keeps_no_second_copy(tmp_path: Path) -> None:
    """At most 5% more than the state itself while it is restored."""
    saved = {f"o.{n}": torch.full((ELEMENTS,), float(n)) for n in range(PIECES)}
    save_file(saved, tmp_path / "rank-00000.safetensors")
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    process = context.Process(target=_restore, args=(tmp_path, its))
    process.start()
    assert mine.poll(60)
    more, first, updates = mine.recv()
    process.join()
    assert first == [float(n) for n in range(PIECES)] and updates == 3
    assert more <= 0.05 * 4 * ELEMENTS * PIECES
