"""`titan doctor`: what this machine has, what is missing, and the command that mends it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click
from titan.compiler.commands.output import binary, print_json
from titan.compiler.commands.runtime import INSTALL
from titan.compiler.plan.frozen import dataclass

COMPILER_NEEDS = ("click", "lark", "networkx", "numpy", "pydantic", "rich")
RUNTIME_NEEDS = ("torch", "safetensors", "tokenizers")
PROBE = (
    "import torch, torch.distributed as d; print(d.is_available() and d.is_gloo_available(), torch.cuda.device_count())"
)


@dataclass(frozen=True, slots=True)
class Check:
    """One line: `state` is ok, warning or missing."""

    name: str
    state: str
    found: str
    cure: str = ""


@click.command(epilog="Example: titan doctor")
@click.option("--json", "as_json", is_flag=True, help="Print [{name, state, found, cure}] to stdout.")
def doctor(as_json: bool) -> int:
    """Check Python, packages, cores, memory, loopback and the cache folder. Exits with 1 when something is missing."""
    rows = list(checks())
    if as_json:
        print_json([asdict(row) for row in rows])
    else:
        for row in rows:
            print(f"{row.state:<8} {row.name:<14} {row.found}" + (f"   -> {row.cure}" if row.cure else ""))
    return 1 if any(row.state == "missing" for row in rows) else 0


def checks() -> Iterator[Check]:
    """All checks, in the order in which they are shown."""
    enough = sys.version_info >= (3, 11)
    yield Check(
        "python", "ok" if enough else "missing", platform.python_version(), "" if enough else "Python 3.11 or newer"
    )
    for names, cure in ((COMPILER_NEEDS, "pip install titan-compiler"), (RUNTIME_NEEDS, INSTALL)):
        yield from (_package(name, cure) for name in names)
    yield _torch()
    yield Check("cores", "ok", f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}")
    yield _memory()
    yield _loopback()
    yield _cache()


def _package(name: str, cure: str) -> Check:
    try:
        return Check(name, "ok", version(name))
    except PackageNotFoundError:
        return Check(name, "missing", "not installed", cure)


def _torch() -> Check:
    """In a process of its own: the compiler does not import PyTorch."""
    try:
        probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120)
        gloo, devices = probe.stdout.split()
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return Check("distributed", "missing", "PyTorch cannot be imported", INSTALL)
    if gloo != "True":
        return Check("distributed", "missing", "PyTorch without gloo", "a PyTorch build with distributed support")
    return Check("distributed", "ok", f"gloo, {devices} CUDA device{'' if devices == '1' else 's'}")


def _memory() -> Check:
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return Check("memory", "warning", "not known on this system")
    few = available < 2 << 30
    return Check("memory", "warning" if few else "ok", f"{binary(available)} free", "2 GiB free memory" if few else "")


def _loopback() -> Check:
    """Ranks on one machine talk over 127.0.0.1."""
    import socket

    try:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
        return Check("loopback", "ok", "127.0.0.1 can be bound")
    except OSError as error:
        return Check("loopback", "missing", str(error), "bring the loopback interface up")


def _cache() -> Check:
    """Where prepared data of shipped corpora is kept."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    writable = os.access(existing, os.W_OK)
    return Check(
        "cache", "ok" if writable else "warning", str(folder / "titan"), "" if writable else "set XDG_CACHE_HOME"
    )
