"""Two network namespaces joined by one link whose rate is limited by a token-bucket filter; needs root.

with slow_link(megabits=800) as ends:   # ((namespace, interface), (namespace, interface))
    ...                                 # in a process of its own: enter(namespace)
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NETWORK = 0x40000000  # CLONE_NEWNET
_DELAY = "50ms"  # most that a packet waits in the filter before it is dropped
End = tuple[str, str]


def missing() -> str:
    """Why there can be no slow link here; empty when there can."""
    if os.geteuid() != 0:
        return "needs root"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"needs {' and '.join(absent)}" if absent else ""


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextmanager
def slow_link(megabits: int) -> Iterator[tuple[End, End]]:
    """Raises subprocess.CalledProcessError where the kernel refuses; whatever was made is removed again."""
    names = [f"titan{os.getpid()}{side}" for side in "ab"]
    links = ("veth-a", "veth-b")
    made: list[str] = []
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            made.append(name)
        first, second = (("ip", "-n", name) for name in names)
        _run(*first, "link", "add", links[0], "type", "veth", "peer", "name", links[1], "netns", names[1])
        for side, (inside, link) in enumerate(((first, links[0]), (second, links[1]))):
            _run(*inside, "addr", "add", f"10.213.0.{side + 1}/24", "dev", link)
            _run(*inside, "link", "set", "lo", "up")
            _run(*inside, "link", "set", link, "up")
            limit = ("rate", f"{megabits}mbit", "burst", "128kb", "latency", _DELAY)
            _run("tc", "-n", names[side], "qdisc", "add", "dev", link, "root", "tbf", *limit)
        yield (names[0], links[0]), (names[1], links[1])
    finally:
        for name in made:
            subprocess.run(("ip", "netns", "del", name), check=False, capture_output=True)


def enter(namespace: str) -> None:
    """Moves this process into a namespace. Raises OSError where it is refused."""
    with (Path("/var/run/netns") / namespace).open() as file:
        library = ctypes.CDLL(None, use_errno=True)
        if library.setns(file.fileno(), _NETWORK) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
