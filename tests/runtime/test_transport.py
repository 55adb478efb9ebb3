"""Collectives and messages: what each means, on loopback and between real processes, and what both do with mistakes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as processes
from titan.compiler.plan.program import Plan
from titan.compiler.plan.text import parse_plan
from titan.grammar.diagnostics import TitanError
from titan.runtime.assemble import same_bits
from titan.runtime.data import SyntheticSource
from titan.runtime.drive import Aborted, drive
from titan.runtime.interpreter import Executable
from titan.runtime.loopback import run_loopback
from titan.runtime.state import allocate
from titan.runtime.transport import process_group
from titan.runtime.transport.base import Communicator, Handle, Transport
from titan.runtime.transport.loopback import Loopback
from titan.runtime.transport.process_group import ProcessGroupTransport
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from tests.runtime.hand_plan import VOCABULARY, hand_plan, hand_text

torch.set_num_threads(1)
Issue = Callable[[Communicator, Tensor], Handle]
DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.int64)
SHAPE = (4, 2, 6)


def value(rank: int, dtype: torch.dtype, shape: tuple[int, ...] = SHAPE) -> Tensor:
    """Different on every rank, with sums that bf16 cannot hold."""
    generator = torch.Generator().manual_seed(rank)
    drawn = torch.randint(-1000, 1000, shape, generator=generator)
    return drawn if dtype == torch.int64 else (drawn.double() / 128).to(dtype)


def wide_sum(values: list[Tensor]) -> Tensor:
    """Member order, in float64 unless the values are float32: narrow values are rounded once."""
    dtype = values[0].dtype
    total = values[0].to(torch.float32) if dtype == torch.bfloat16 else values[0]
    for v in values[1:]:
        total = total + v
    return total.to(dtype)


def joined(values: list[Tensor], dim: int) -> Tensor:
    return torch.cat(values, dim)


# (name, issue, what member k gets from everyone's values)
CASES: tuple[tuple[str, Issue, Callable[[list[Tensor], int], Tensor]], ...] = (
    ("gather 0", lambda c, v: c.all_gather(v, 0), lambda vs, k: joined(vs, 0)),
    ("gather 1", lambda c, v: c.all_gather(v, 1), lambda vs, k: joined(vs, 1)),
    ("gather 2", lambda c, v: c.all_gather(v.mT, 2), lambda vs, k: joined([v.mT for v in vs], 2)),
    ("scatter 0", lambda c, v: c.reduce_scatter(v, 0), lambda vs, k: wide_sum(vs).chunk(len(vs), 0)[k]),
    ("scatter 2", lambda c, v: c.reduce_scatter(v, 2), lambda vs, k: wide_sum(vs).chunk(len(vs), 2)[k]),
    ("sum", lambda c, v: c.all_reduce(v, "sum"), lambda vs, k: wide_sum(vs)),
    ("max", lambda c, v: c.all_reduce(v, "max"), lambda vs, k: torch.stack(vs).amax(0)),
    ("a2a 0 1", lambda c, v: c.all_to_all(v, 0, 1), lambda vs, k: joined([v.chunk(len(vs), 0)[k] for v in vs], 1)),
    ("a2a 2 0", lambda c, v: c.all_to_all(v, 2, 0), lambda vs, k: joined([v.chunk(len(vs), 2)[k] for v in vs], 0)),
    ("broadcast", lambda c, v: c.broadcast(v.clone(), 1), lambda vs, k: vs[1]),
)


def in_place(communicator: Communicator, flat: Tensor) -> list[Handle]:
    """The three operations on flat buffers, one after another on three copies."""
    copies = [flat.clone(), flat.clone(), flat.clone()]
    handles = [
        communicator.all_reduce_in_place(copies[0]),
        communicator.reduce_scatter_in_place(copies[1]),
        communicator.all_gather_in_place(copies[2]),
    ]
    return [_Kept(handle, copy) for handle, copy in zip(handles, copies)]


class _Kept(Handle):
    """An in-place operation that gives its buffer."""

    def __init__(self, handle: Handle, buffer: Tensor) -> None:
        self._handle, self._buffer = handle, buffer

    def done(self) -> bool:
        return self._handle.done()

    def result(self) -> Tensor:
        self._handle.result()
        return self._buffer


def check_in_place(found: list[Tensor], flats: list[Tensor], member: int) -> None:
    size, total = len(flats), wide_sum(flats)
    assert same_bits(found[0], total)
    assert same_bits(found[1].chunk(size)[member], total.chunk(size)[member])
    assert same_bits(found[2], torch.cat([f.chunk(size)[k] for k, f in enumerate(flats)]))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_loopback_collectives(size: int, dtype: torch.dtype) -> None:
    world, members = Loopback(), tuple(range(5, 5 + size))
    ends = [world.transport(rank).communicator(members, "s") for rank in members]
    shape = (4 * 3, 2, 6)
    values = [value(rank, dtype, shape) for rank in range(size)]
    for name, issue, expected in CASES:
        if name == "broadcast" and size == 1:
            continue
        handles = [issue(end, v) for end, v in zip(ends, values)]
        for k, handle in enumerate(handles):
            assert handle.done(), name
            found = handle.result()
            assert found is not None and found.is_contiguous() and same_bits(found, expected(values, k)), name
    flats = [v.flatten() for v in values]
    handles = [in_place(end, flat) for end, flat in zip(ends, flats)]
    for k, row in enumerate(handles):
        check_in_place([h.result() for h in row], flats, k)
    assert world.unmatched() == []


def test_a_collective_waits_for_its_last_member_and_gives_copies() -> None:
    world, members = Loopback(), (0, 3)
    first, last = (world.transport(r).communicator(members, "s") for r in members)
    mine = torch.ones(2)
    handle = first.all_reduce(mine, "sum")
    assert not handle.done() and handle.waiting_for() == (3,)
    assert world.unmatched() == ["`all_reduce [2] float32 op=sum` on stream s: ranks [3] of [0, 3] never came"]
    other = last.all_reduce(torch.ones(2), "sum")
    assert handle.done() and other.done() and handle.waiting_for() == ()
    left, right = handle.result(), other.result()
    assert left is not None and right is not None
    mine.zero_()
    left.add_(1)
    assert right.tolist() == [2.0, 2.0]


def test_messages_arrive_in_order_and_are_copies() -> None:
    world = Loopback()
    out = world.transport(0).channel(0, 1, "act")
    into = world.transport(1).channel(0, 1, "act")
    early = into.recv((2,), torch.float32)
    assert not early.done() and early.waiting_for() == (0,)
    sent = torch.tensor([1.0, 2.0])
    handles = [out.send(sent), out.send(torch.tensor([3.0, 4.0]))]
    assert [h.done() for h in handles] == [True, False] and handles[1].waiting_for() == (1,)
    sent.zero_()
    late = into.recv((2,), torch.float32)
    got = [h.result() for h in (early, late)]
    assert [g.tolist() for g in got if g is not None] == [[1.0, 2.0], [3.0, 4.0]]
    with pytest.raises(
        TitanError, match=r"rank 0 sends `message \[3\] float32`, rank 1 expects `message \[2\] float32`"
    ):
        out.send(torch.zeros(3))
        into.recv((2,), torch.float32)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            lambda c: c.all_reduce(torch.zeros(2), "max"),
            "op=sum` on rank 4 but `all_reduce [2] float32 op=max` on rank 7",
        ),
        (lambda c: c.all_reduce(torch.zeros(3), "sum"), "`all_reduce [3] float32 op=sum` on rank 7"),
        (lambda c: c.all_reduce(torch.zeros(2).double(), "sum"), "`all_reduce [2] float64 op=sum` on rank 7"),
        (lambda c: c.all_gather(torch.zeros(2), 0), "`all_gather [2] float32 dim=0` on rank 7"),
    ],
)
def test_members_that_disagree_are_named(other: Callable[[Communicator], Handle], said: str) -> None:
    world = Loopback()
    world.transport(4).communicator((4, 7), "tensor").all_reduce(torch.zeros(2), "sum")
    with pytest.raises(TitanError) as caught:
        other(world.transport(7).communicator((4, 7), "tensor"))
    assert caught.value.diagnostics[0].code == "T611" and said in caught.value.diagnostics[0].message


# --- real processes


def spawn(body: Callable[..., None], size: int, folder: Path, *arguments: object) -> None:
    processes.start_processes(body, (size, folder, *arguments), nprocs=size, start_method="fork")


def settled(handle: Handle) -> Tensor | None:
    deadline = time.monotonic() + 20
    while not handle.done():
        assert time.monotonic() < deadline, "an operation never ended"
        os.sched_yield()
    return handle.result()


def _group_plan(size: int) -> Plan:
    """A plan whose only communication is one group of all ranks and a channel from rank 0 to rank 1."""
    return parse_plan(
        f"titan plan 1\n\nmesh pipeline={size}\n\ntensor x f32[2]\n"
        + "".join(
            f"\nrole pipeline={k} chunks=1 layers=\nbuffer b.loss metric f32[1]\nblock a\n"
            "   0  all_reduce x? <- b.loss @pipeline !s op=sum\n"
            + ("   1  send t.x? <- x @pipeline !act peer=1\n" if k == 0 else "")
            + ("   1  recv x? @pipeline !act peer=-1\n" if k == 1 else "")
            + "order train\n  a\n"
            for k in range(size)
        )
    )


def _collectives(rank: int, size: int, folder: Path, small: int) -> None:
    torch.set_num_threads(1)
    process_group.SMALL = small
    transport: Transport = ProcessGroupTransport(_group_plan(size), rank, FileStore(str(folder / "store"), size))
    end = transport.communicator(tuple(range(size)), "s")
    for dtype in DTYPES:
        values = [value(r, dtype, (4 * 3, 2, 6)) for r in range(size)]
        for name, issue, expected in CASES:
            found, wanted = settled(issue(end, values[rank])), expected(values, rank)
            assert found is not None and found.shape == wanted.shape, (name, dtype)
            assert same_bits(found, wanted), (name, dtype)
        flats = [v.flatten() for v in values]
        results = [settled(h) for h in in_place(end, flats[rank])]
        check_in_place([r for r in results if r is not None], flats, rank)
    if rank < 2:
        channel = transport.channel(0, 1, "act")
        for k in range(3):
            sent = value(k, torch.bfloat16)
            got = settled(channel.send(sent) if rank == 0 else channel.recv(SHAPE, torch.bfloat16))
            assert rank == 0 or (got is not None and same_bits(got, sent))
    (folder / f"passed{rank}").touch()


@pytest.mark.parametrize(("size", "small"), [(2, 1 << 19), (2, 0), (3, 1 << 19)])
def test_gloo_collectives_equal_loopback_to_the_bit(size: int, small: int, tmp_path: Path) -> None:
    """small = 0: sums go through gloo's own all-reduce; of two members those too are exact."""
    spawn(_collectives, size, tmp_path, small)
    assert all((tmp_path / f"passed{rank}").exists() for rank in range(size))


def _train(rank: int, size: int, folder: Path, text: str) -> None:
    torch.set_num_threads(1)
    plan = parse_plan(text)
    state = allocate(plan, rank)
    transport = ProcessGroupTransport(plan, rank, FileStore(str(folder / "store"), size))
    executable = Executable(plan, rank, transport, state, SyntheticSource(VOCABULARY, 3, 0.3), check=True)
    reports = [drive(executable, step) for step in range(3)]
    torch.save((state.buffers, [r.loss for r in reports], [r.grad_norm for r in reports]), folder / f"rank{rank}")


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_four_processes_train_to_the_same_bits_as_loopback(dtype: str, tmp_path: Path) -> None:
    text = hand_text(dtype, sharded=True)
    spawn(_train, 4, tmp_path, text)
    wanted = run_loopback(parse_plan(text), 3, SyntheticSource(VOCABULARY, 3, 0.3))
    for rank, state in enumerate(wanted.states):
        buffers, losses, norms = torch.load(tmp_path / f"rank{rank}")
        assert losses == [reports[rank].loss for reports in wanted.reports]
        assert norms == [reports[rank].grad_norm for reports in wanted.reports]
        for name, buffer in state.buffers.items():
            assert same_bits(buffer, buffers[name]), name


class _After:
    """An abort flag that is raised after some seconds."""

    def __init__(self, seconds: float) -> None:
        self._when = time.monotonic() + seconds

    def aborted(self) -> bool:
        return time.monotonic() > self._when


def _abandoned(rank: int, size: int, folder: Path, dies: bool) -> None:
    """Rank 1 never starts its step: it dies, or stays silent while the flag is raised."""
    torch.set_num_threads(1)
    plan = hand_plan()
    transport = ProcessGroupTransport(plan, rank, FileStore(str(folder / "store"), size))
    if rank == 1:
        if not dies:
            time.sleep(1.5)
        os._exit(0)
    executable = Executable(plan, rank, transport, allocate(plan, rank), SyntheticSource(VOCABULARY))
    start = time.monotonic()
    try:
        drive(executable, 0, _After(0.3))
    except Aborted as error:
        assert error.diagnostics[0].code == "T614" and executable.describe(error.position).startswith("wait")
        assert time.monotonic() - start < 1.2
        (folder / f"noticed{rank}").touch()
    os._exit(0)


@pytest.mark.parametrize("dies", [True, False])
def test_all_ranks_stop_when_one_is_gone(dies: bool, tmp_path: Path) -> None:
    spawn(_abandoned, 4, tmp_path, dies)
    assert sorted(p.name for p in tmp_path.glob("noticed*")) == ["noticed0", "noticed2", "noticed3"]
