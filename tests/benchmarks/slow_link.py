"""Two network namespaces joined by one link whose rate is limited by a token-bucket filter; needs root.

with slow_link(megabits=800) as ends:
    ...                         # in a process of its own: ends[0].enter(), or started by a command: ends[0].prefix
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NETWORK = 0x40000000  # CLONE_NEWNET
_BUCKET = ("burst", "128kb", "latency", "1s")  # what may go at once, and how long may queue before it is dropped


class Impossible(Exception):
    """Why there is no such link here."""


@dataclass(frozen=True, slots=True)
class End:
    """A namespace, and the interface in it that the link has."""

    namespace: str
    interface: str

    @property
    def prefix(self) -> list[str]:
        """Words before a command that is to run here."""
        return ["ip", "netns", "exec", self.namespace]

    def enter(self) -> None:
        """Moves this process here. Raises OSError where it is refused."""
        with (Path("/var/run/netns") / self.namespace).open() as file:
            library = ctypes.CDLL(None, use_errno=True)
            if library.setns(file.fileno(), _NETWORK) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))


@contextlib.contextmanager
def slow_link(megabits: int) -> Iterator[tuple[End, End]]:
    """A link of so many bits per second each way; it is gone afterwards. Raises Impossible where it cannot be made."""
    ends = (End(f"titan{os.getpid()}a", "veth-a"), End(f"titan{os.getpid()}b", "veth-b"))
    try:
        for end in ends:
            _run("ip", "netns", "add", end.namespace)
        first, second = ends
        peer = ("peer", "name", second.interface, "netns", second.namespace)
        _run("ip", "-n", first.namespace, "link", "add", first.interface, "type", "veth", *peer)
        for number, end in enumerate(ends, 1):
            inside, device = ("ip", "-n", end.namespace), ("dev", end.interface)
            _run(*inside, "addr", "add", f"10.213.0.{number}/24", *device)
            _run(*inside, "link", "set", "lo", "up")
            _run(*inside, "link", "set", end.interface, "up")
            limit = ("tbf", "rate", f"{megabits}mbit", *_BUCKET)
            _run("tc", "-n", end.namespace, "qdisc", "add", *device, "root", *limit)
        yield ends
    finally:
        for end in ends:
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "del", end.namespace], capture_output=True, check=False)


def _run(*words: str) -> None:
    try:
        found = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError as error:
        raise Impossible(f"{words[0]}: {error.strerror}") from error
    if found.returncode:
        raise Impossible(f"{' '.join(words[:4])}: {found.stderr.strip() or found.returncode}")
