"""Orders to and from PyTorch: its simulation takes ours, its runtime trains with ours, and what it builds runs here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from titan.compiler.formats.pipeline_csv import order_of, read_order, write_order
from titan.compiler.lower import lower
from titan.compiler.schedules.order import Order
from titan.compiler.schedules.registry import SCHEDULES
from titan.compiler.strategy import Strategy
from titan.compiler.verify.proofs import verify
from titan.grammar.diagnostics import TitanError
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from tests.compiler.schedules.small import small_spec
from tests.equivalence.comparison import differences, plans, train_plan, train_reference
from tests.runtime.torch_schedules import FOLDED, LOOPED, accepted, table

ONE_COPY = tuple(name for name, row in SCHEDULES.items() if row.copies == 1)


@pytest.mark.parametrize("name", ONE_COPY)
def test_our_tables_are_read_back_and_pass_torchs_simulation(name: str) -> None:
    schedule, seen = SCHEDULES[name], 0
    for ranks, micro_batches in ((1, 3), (2, 5), (4, 4), (4, 9), (8, 17)):
        if not schedule.legal(ranks, micro_batches):
            continue
        order = schedule.order(ranks, micro_batches)
        text = write_order(order)
        assert read_order(text) == order
        assert accepted(text, order.placement) >= max(map(len, order.ranks))
        seen += 1
    assert seen >= 2


def test_two_copies_are_refused_with_the_reason() -> None:
    with pytest.raises(TitanError) as caught:
        write_order(SCHEDULES["dualpipe"].order(4, 8))
    found = caught.value.diagnostics[0]
    assert found.code == "T411" and "2 copies" in found.message and found.nearest == ("schedule = dualpipe_v",)


def torch_tables() -> list[tuple[str, int, int, int]]:
    """(schedule, ranks, micro-batches, chunks): all but 1F1B's class, whose table is wrong in this version."""
    cases = [("GPipe", ranks, m, 1) for ranks in (2, 4) for m in (1, 4, 7)]
    for ranks in (1, 2, 4, 8):
        for m in (ranks, 2 * ranks, 4 * ranks, 4 * ranks + 1):
            cases += [(name, ranks, m, chunks) for name in LOOPED for chunks in (1, 2, 3)]
            cases += [(name, ranks, m, 2) for name in FOLDED]
    return cases


def test_every_table_that_torch_builds_is_an_order() -> None:
    read = 0
    for name, ranks, micro_batches, chunks in torch_tables():
        text = table(name, ranks, micro_batches, chunks)
        if text is None:
            continue
        order = read_order(text, f"{name}.csv")
        assert len(order.ranks) == ranks and len(order.placement) == ranks * chunks
        again = read_order(write_order(order))
        assert again == order
        read += 1
    assert read >= 60


def test_v_orders_are_torchs_own() -> None:
    """DualPipeV element by element; ZB-V where it does not run out of micro-batches."""
    for ranks, micro_batches in ((2, 4), (4, 8), (4, 10), (8, 16)):
        text = table("DualPipeV", ranks, micro_batches)
        assert text is not None
        assert read_order(text) == SCHEDULES["dualpipe_v"].order(ranks, micro_batches)


TRAINED = [
    ("GPipe", 2, 3, 1), ("Interleaved1F1B", 2, 4, 2), ("LoopedBFS", 2, 3, 2), ("InterleavedZeroBubble", 4, 8, 2),
    ("InterleavedZeroBubble", 2, 4, 1), ("ZBVZeroBubble", 4, 7, 2), ("ZBVZeroBubble", 2, 2, 2), ("DualPipeV", 2, 5, 2),
]  # fmt: skip


@pytest.mark.parametrize(("name", "ranks", "micro_batches", "chunks"), TRAINED)
def test_torchs_orders_are_proven_and_train_like_one_process(
    name: str, ranks: int, micro_batches: int, chunks: int
) -> None:
    text = table(name, ranks, micro_batches, chunks)
    assert text is not None
    order = read_order(text)
    stages = (*(1,) * (ranks * chunks - 1), 2)
    spec = small_spec(layers=sum(stages), batch=micro_batches, devices=ranks, tied=True)
    strategy = Strategy(pipeline=ranks, micro_batches=micro_batches, stages=stages, written_order=order)
    plan, single = plans(spec, strategy)
    assert {name: proof.findings for name, proof in verify(plan).items() if not proof.ok} == {}
    assert order_of(plan) == order
    one = train_plan(single, spec, steps=1)
    assert differences(train_plan(plan, spec, steps=1), train_reference(single, spec, one.initial, steps=1)) == []


BROKEN = {
    "nothing": ("", "no action"),
    "unknown": ("0F0,0X0,0B0\n", "`0X0` is no action"),
    "twice": ("0F0,0F0,0B0\n", "0F0 is done 2 times"),
    "on two ranks": ("0F0,0B0\n0F1,0B1\n", "ranks 0 and 1"),
    "no such stage": ("0F0,0B0\n2F0,2B0\n", "stage 1 of 3"),
    "no backward": ("0F0,0F1,0B0\n", "micro-batch 1"),
    "half a backward": ("0F0,0I0\n", "micro-batch 0"),
    "both backwards": ("0F0,0I0,0W0,0B0\n", "twice"),
    "a forward lost": ("0F1,0B1\n", "0F0 is missing"),
    "no pair": ("(0F0;0F1)OVERLAP_F_B\n", "no pair"),
    "stuck": ("0F0,0B0\n1B0,1F0\n", "wait for each other"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_tables_are_refused(name: str) -> None:
    text, words = BROKEN[name]
    with pytest.raises(TitanError) as caught:
        read_order(text)
    found = caught.value.diagnostics[0]
    assert found.code == "T410" and words in found.message


def test_sends_and_sums_of_a_lowered_table_are_left_out() -> None:
    lowered = "0UNSHARD,0F0,0SEND_F0,,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\n1RECV_F0,1F0,1B0,1SEND_B0\n"
    assert read_order(lowered) == read_order("0F0,0B0\n1F0,1B0\n")


# --- torch's runtime with our orders

WIDTH, MICRO_BATCHES = 6, 6


def stage_module(stage: int) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Tanh())


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randn(2 * MICRO_BATCHES, WIDTH, dtype=torch.float64, generator=generator) for _ in "xy")  # type: ignore[return-value]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def expected(stages: int) -> list[list[Tensor]]:
    modules = [stage_module(stage) for stage in range(stages)]
    inputs, targets = batch()
    for x, y in zip(inputs.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), strict=True):
        for module in modules:
            x = module(x)
        (loss(x, y) / MICRO_BATCHES).backward()
    return [[p.grad for p in module.parameters() if p.grad is not None] for module in modules]


def train(rank: int, folder: str, names: tuple[str, ...]) -> None:
    """One of two ranks: runs every table in torch's runtime and leaves the worst error of each."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    errors = {name: one_table(rank, f"{folder}/{name}.csv") for name in names}
    torch.save(errors, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def one_table(rank: int, path: str) -> float:
    order = read_order(Path(path).read_text())
    number = len(order.placement)
    held = [s for s in range(number) if order.placement[s] == rank]
    modules = {s: stage_module(s) for s in held}
    stages = [PipelineStage(modules[s], s, number, torch.device("cpu")) for s in held]
    runtime = _PipelineScheduleRuntime(stages, MICRO_BATCHES, loss_fn=loss)
    runtime._load_csv(path, format="compute_only")
    inputs, targets = batch()
    arguments: tuple[Any, ...] = (inputs,) if order.placement[0] == rank else ()
    runtime.step(*arguments, target=targets if order.placement[-1] == rank else None)
    wanted = expected(number)
    return max(
        float((p.grad - g).abs().max())
        for s in held
        for p, g in zip(modules[s].parameters(), wanted[s], strict=True)
        if p.grad is not None
    )


def test_our_orders_train_in_torchs_runtime(tmp_path: Path) -> None:
    names = tuple(name for name in ONE_COPY if SCHEDULES[name].legal(2, MICRO_BATCHES))
    assert len(names) == len(ONE_COPY)
    for name in names:
        (tmp_path / f"{name}.csv").write_text(write_order(SCHEDULES[name].order(2, MICRO_BATCHES)))
    processes.start_processes(train, (str(tmp_path), names), nprocs=2, start_method="fork")
    for rank in (0, 1):
        errors = torch.load(tmp_path / f"{rank}.pt")
        assert set(errors) == set(names) and all(error < 1e-12 for error in errors.values()), errors


def test_orders_of_plans_go_out_as_they_came_in() -> None:
    """A plan of every schedule holds its order, pairs included."""
    for name, row in SCHEDULES.items():
        chunks = max(row.chunks, 1)
        spec = small_spec(layers=4, batch=8, devices=2)
        stages = (2, 2) if chunks == 1 else (1, 1, 1, 1)
        strategy = Strategy(pipeline=2, micro_batches=8, schedule=name, stages=stages)
        found: Order = order_of(lower(spec, strategy))
        assert found == strategy.order, name
