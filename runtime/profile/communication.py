"""Times collectives and transfers by size between the members of a pool, and what they take of a core meanwhile.

Between two collectives every member computes a little, as in a program: members are as little in step as there, and
what has slept meanwhile must wake. Waits are the interpreter's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from titan.runtime.drive import patience, poll, settled
from titan.runtime.profile.pool import Member
from titan.runtime.transport.base import Handle
from titan.runtime.transport.process_group import ProcessGroupChannel, ProcessGroupCommunicator, backends
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

WARM_UP = 2
ROUNDS = 3
PRODUCTS = 6  # of matrices between two operations


def _flat(c: ProcessGroupCommunicator, size: int, device: torch.device) -> Tensor:
    return torch.zeros(max(size // 4 // c.size, 1) * c.size, device=device)


def _operation(kind: str, c: ProcessGroupCommunicator, size: int, device: torch.device) -> Callable[[], Handle]:
    """A collective whose whole tensor has `size` bytes of float32."""
    whole = _flat(c, size, device)
    part = whole[: len(whole) // c.size]
    return {
        "all_reduce": lambda: c.all_reduce(whole, "sum"),
        "all_gather": lambda: c.all_gather(part, 0),
        "reduce_scatter": lambda: c.reduce_scatter(whole, 0),
        "all_to_all": lambda: c.all_to_all(whole, 0, 0),
    }[kind]


def _finish(member: Member, handle: Handle, members: int) -> None:
    """Waits like one of so many ranks at work on this machine."""
    settled(handle, None, patience(members))
    handle.result()
    member.synchronize()


def _communicator(member: Member, members: int, purpose: str) -> ProcessGroupCommunicator:
    """Of the first `members` ranks, made once for each purpose."""
    key = f"group/{purpose}/{members}"
    if key not in member.kept:
        backend = backends(member.device)(PrefixStore(key, member.store), member.rank, members)
        member.kept[key] = ProcessGroupCommunicator(tuple(range(members)), member.rank, backend, member.device)
    found: ProcessGroupCommunicator = member.kept[key]
    return found


class _Compute:
    """A little compute, of about a millisecond on a core."""

    def __init__(self, device: torch.device) -> None:
        self._a, self._b = torch.ones(128, 256, device=device), torch.ones(256, 512, device=device)

    def __call__(self) -> None:
        for _ in range(PRODUCTS):
            torch.mm(self._a, self._b)


def time_collective(member: Member, kind: str, members: int, size: int, times: int) -> tuple[float, float]:
    """Seconds that a collective of the first `members` ranks adds to a loop of compute, and those of them in which the
    rank asks for it."""
    if member.rank >= members:
        return 0.0, 0.0
    group = _communicator(member, members, "probe")
    operation, compute = _operation(kind, group, size, member.device), _Compute(member.device)
    asking: list[float] = []

    def loop(communicates: bool, times: int) -> float:
        _finish(member, group.all_reduce(torch.zeros(members, device=member.device), "sum"), members)
        start = time.perf_counter()
        for _ in range(times):
            compute()
            if communicates:
                begun = time.perf_counter()
                handle = operation()
                asking.append(time.perf_counter() - begun)
                _finish(member, handle, members)
        member.synchronize()
        return (time.perf_counter() - start) / times

    loop(True, WARM_UP)
    asking.clear()
    found = [loop(True, times) - loop(False, times) for _ in range(ROUNDS)]
    return sorted(found)[ROUNDS // 2], sum(asking) / len(asking)


def _times(member: Member, operation: Callable[[], Handle], members: int, times: int) -> list[float]:
    found = []
    for _ in range(WARM_UP + times):
        start = time.perf_counter()
        _finish(member, operation(), members)
        found.append(time.perf_counter() - start)
    return found[WARM_UP:]


def time_transfer(member: Member, size: int, times: int) -> list[float]:
    """Seconds of a message of `size` bytes between ranks 0 and 1, in each of some rounds of there and back: what is not
    the compute that each does before it sends."""
    if member.rank > 1:
        return []
    channels: list[ProcessGroupChannel] = []
    for sender in (0, 1):
        key = f"channel/{sender}"
        if key not in member.kept:
            position = 0 if member.rank == sender else 1
            backend = backends(member.device)(PrefixStore(key, member.store), position, 2)
            member.kept[key] = ProcessGroupChannel(backend, position, member.device)
        channels.append(member.kept[key])
    value, compute = torch.zeros(max(size // 4, 1), device=member.device), _Compute(member.device)

    def send(channel: ProcessGroupChannel) -> None:
        _finish(member, channel.send(value), 2)

    def receive(channel: ProcessGroupChannel) -> None:
        _finish(member, channel.recv(tuple(value.shape), value.dtype), 2)

    def loop(communicates: bool, times: int) -> float:
        """Seconds of a round: either rank computes and sends in its turn, or computes for both turns."""
        start = time.perf_counter()
        for _ in range(times):
            for turn in (0, 1):
                if not communicates or turn == member.rank:
                    compute()
                if communicates:
                    (send if turn == member.rank else receive)(channels[turn])
        member.synchronize()
        return (time.perf_counter() - start) / times

    loop(True, WARM_UP)
    return [(loop(True, times) - loop(False, times)) / 2 for _ in range(ROUNDS)]


def time_overlap(member: Member, members: int, size: int, times: int) -> list[tuple[float, float, float]]:
    """(collective alone, compute alone, both begun together) in seconds; compute takes at least twice as long."""
    if member.rank >= members:
        return []
    group = _communicator(member, members, "overlap")
    operation = _operation("all_gather", group, size, member.device)
    a = torch.ones(256, 256, device=member.device)
    b = torch.ones_like(a)

    def compute(number: int) -> None:
        for _ in range(number):
            torch.mm(a, b)

    collective = sorted(_times(member, operation, members, 5))[2]
    start = time.perf_counter()
    compute(20)
    member.synchronize()
    one = (time.perf_counter() - start) / 20
    both = torch.tensor([collective, one])
    _finish(member, group.all_reduce_in_place(both), members)  # all members do the same number
    number = int(2.5 * float(both[0] / both[1])) + 1
    found = []
    for _ in range(times):
        seconds = []
        for communicates, computes in ((True, False), (False, True), (True, True)):
            _finish(member, _operation("all_reduce", group, 4 * members, member.device)(), members)
            start = time.perf_counter()
            handle = operation() if communicates else None
            if computes:
                compute(number)
                member.synchronize()
            if handle is not None:
                _finish(member, handle, members)
            seconds.append(time.perf_counter() - start)
        found.append((seconds[0], seconds[1], seconds[2]))
    return found


def time_polling(member: Member, computing: int, waiting: int, seconds: float) -> float:
    """Products per second of a rank while the first `computing` multiply and `waiting` others poll as waits do."""
    member.meet()
    end, done = time.perf_counter() + seconds, 0
    if member.rank < computing:
        a = torch.ones(128, 128, device=member.device)
        while time.perf_counter() < end:
            torch.mm(a, a)
            done += 1
    elif member.rank < computing + waiting:
        pending = _Never()
        while time.perf_counter() < end:
            poll(pending)
    return done / seconds


class _Never(Handle):
    """An operation that does not end."""

    def done(self) -> bool:
        return False

    def result(self) -> None:
        return None


def time_stream(member: Member, members: int, size: int, times: int) -> list[float]:
    """Bytes per second of copies of `size` bytes, reads and writes counted, in the first `members` at once."""
    if member.rank >= members:
        return []
    source = torch.ones(size // 4, device=member.device)
    target = torch.empty_like(source)
    found = []
    for _ in range(times):
        start = time.perf_counter()
        target.copy_(source)
        member.synchronize()
        found.append(2 * size / (time.perf_counter() - start))
    return found


def rank_memory(member: Member) -> dict[str, Any]:
    """Bytes: what this process holds without tensors, and what one communicator of the first two ranks adds, or of
    the only one."""
    if member.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(member.device)
        return {"total": total, "base": total - free, "communicator": 0}
    torch.mm(torch.ones(256, 256), torch.ones(256, 256))  # libraries take what they need
    base = _resident()
    held, number, members = [], 8, min(member.size, 2)
    for k in range(number):
        if member.rank < members:
            backend = backends(member.device)(PrefixStore(f"memory/{k}", member.store), member.rank, members)
            group = ProcessGroupCommunicator(tuple(range(members)), member.rank, backend, member.device)
            _finish(member, group.all_reduce(torch.zeros(1024), "sum"), members)
            held.append(group)
    return {"total": 0, "base": base, "communicator": max(_resident() - base, 0) // number}


def _resident() -> int:
    """Bytes of this process in memory that no other process shares by fork."""
    with open("/proc/self/smaps_rollup") as lines:
        fields = dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith(("0", "f", "5", "7")))
    private = sum(int(fields[k].split()[0]) for k in ("Private_Clean", "Private_Dirty") if k in fields)
    return 1024 * private
