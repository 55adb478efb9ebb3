"""Two network namespaces with a slow link between them, where the machine lets us make them."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

BUCKET = ("burst", "64kb", "latency", "1s")  # of the token bucket: what may go at once, and how long may queue


@dataclass(frozen=True)
class Link:
    """How to run a program at each end, and the name of the interface there."""

    prefixes: tuple[list[str], list[str]]
    interfaces: tuple[str, str]


class Impossible(Exception):
    """Why there is no such link here."""


@contextlib.contextmanager
def slow_link(rate: str) -> Iterator[Link]:
    """A link of so many bits per second each way (`200mbit`); it is gone afterwards."""
    number = os.getpid()
    names = tuple(f"titan{number}{end}" for end in "ab")
    interfaces = tuple(f"tn{number % 10**8}{end}" for end in "ab")
    try:
        _run("ip", "netns", "add", names[0])
        _run("ip", "netns", "add", names[1])
        _run("ip", "link", "add", interfaces[0], "type", "veth", "peer", "name", interfaces[1])
        for end, (name, interface) in enumerate(zip(names, interfaces, strict=True), 1):
            _run("ip", "link", "set", interface, "netns", name)
            inside = ("ip", "netns", "exec", name)
            _run(*inside, "ip", "addr", "add", f"10.199.77.{end}/24", "dev", interface)
            _run(*inside, "ip", "link", "set", interface, "up")
            _run(*inside, "ip", "link", "set", "lo", "up")
            _run(*inside, "tc", "qdisc", "add", "dev", interface, "root", "tbf", "rate", rate, *BUCKET)
        yield Link(
            (["ip", "netns", "exec", names[0]], ["ip", "netns", "exec", names[1]]), (interfaces[0], interfaces[1])
        )
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _run(*command: str) -> None:
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise Impossible(f"{command[0]}: {error.strerror}") from error
    if found.returncode:
        raise Impossible(f"{' '.join(command[:4])}: {found.stderr.strip() or found.returncode}")
