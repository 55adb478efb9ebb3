"""Waiting for an operation under way: it ends when the operation does, or when the run is aborted."""

from __future__ import annotations

import os
import threading
import time

import torch
from titan.runtime.drive import ALONE, SHARING, patience, settled
from titan.runtime.transport.base import Handle, Then
from torch import Tensor


class Later(Handle):
    """Done when its event is set; counts how often it was slept on."""

    def __init__(self) -> None:
        self.event, self.naps = threading.Event(), 0

    def done(self) -> bool:
        return self.event.is_set()

    def result(self) -> Tensor | None:
        return torch.ones(1)

    def settle(self, seconds: float) -> None:
        self.naps += 1
        self.event.wait(seconds)


class Flag:
    def __init__(self, after: float) -> None:
        self._end = time.perf_counter() + after

    def aborted(self) -> bool:
        return time.perf_counter() > self._end


def test_a_long_wait_sleeps_and_ends_with_the_operation() -> None:
    handle = Later()
    timer = threading.Timer(0.1, handle.event.set)
    timer.start()
    assert settled(Then(handle, lambda value: value), None)
    assert 1 <= handle.naps <= 100  # a busy wait of 0.1 s would look thousands of times


def test_a_finished_operation_is_never_slept_on() -> None:
    handle = Later()
    handle.event.set()
    assert settled(handle, None)
    assert handle.naps == 0


def test_a_wait_polls_as_long_as_it_may_before_it_sleeps() -> None:
    for spin, sleeps in ((5.0, False), (1e-3, True)):
        handle = Later()
        threading.Timer(0.1, handle.event.set).start()
        assert settled(handle, None, spin)
        assert (handle.naps > 0) is sleeps


def test_only_ranks_with_a_core_each_poll_for_long() -> None:
    cores = len(os.sched_getaffinity(0))
    assert patience(1) == patience(cores) == ALONE > SHARING == patience(cores + 1)


def test_an_abort_ends_a_wait_for_something_that_never_comes() -> None:
    start = time.perf_counter()
    assert not settled(Later(), Flag(0.05))
    assert time.perf_counter() - start < 2.0
