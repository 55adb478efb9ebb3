"""ZeRO beside torch's FSDP2 (`fully_shard`) on gloo: the same model, two ranks, interleaved rounds.

    python -m tests.benchmarks.zero [--quick] --json

`step_time_ratio` and `peak_ratio`, by stage of ZeRO, are ours divided by theirs: the median over rounds of the ratio of
the slower rank's step times, and the most bytes of tensors alive in a step. Theirs: stage 1 sums gradients and frees
parameters after the last micro-batch only, stage 2 keeps parameters from forward to the end of backward, stage 3 frees
them in between. `state_bytes_exact`: parameters, gradients and optimizer state that our ranks hold are those of the
formulas; `wire_bytes_exact`: so is what goes into the process groups.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import torch.nn.functional as F
from titan.compiler.lower import lower
from titan.compiler.plan.program import Plan
from titan.compiler.spec.resolve import resolve
from titan.compiler.strategy import Strategy
from titan.grammar.parser import parse
from titan.runtime.data import SyntheticSource
from titan.runtime.drive import drive
from titan.runtime.interpreter import Executable
from titan.runtime.state import allocate
from titan.runtime.transport.process_group import ProcessGroupCommunicator, ProcessGroupTransport
from torch import Tensor, nn

from tests.runtime.alone import Storages

RANKS, LAYERS, DIM, HEADS, FFN, VOCAB, SEQUENCE, MICRO_BATCHES, CLIP = 2, 6, 256, 16, 768, 2048, 128, 4, 1.0
STAGES = (1, 2, 3)
Step = Callable[[], None]


class AllStorages(Storages):
    """Also follows storages that are resized, as FSDP does with parameters."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(function, types, args, kwargs)
        held = (known() for known in list(self._known.values()))
        self.total = max(getattr(self, "total", 0), sum(storage.nbytes() for storage in held if storage is not None))
        return result


# --- ours


def plan_of(stage: int) -> Plan:
    text = f"""import clusters.local
model = model {{
    vocab = {VOCAB}, hidden = {DIM}, layers = {LAYERS} * dense {{ ffn = {FFN} }}, max_positions = {SEQUENCE}
    attention = gqa {{ heads = {HEADS}, kv_heads = {HEADS}, head_dim = {DIM // HEADS} }}, norm = rms_norm
    positions = rope, rope = {{ theta = 500000 }}, init_std = 0.02
}}
cluster = local.cpu with {{ devices_per_node = {RANKS} }}
train {{
    sequence = {SEQUENCE}, global_batch = {RANKS * MICRO_BATCHES}, precision = fp32, steps = 100, clip = {CLIP}
    optimizer = adamw {{ learning_rate = 8e-4 }}, data = synthetic({VOCAB})
}}
"""
    strategy = Strategy(data=RANKS, zero=stage, micro_batches=MICRO_BATCHES, stages=(LAYERS,))
    return lower(resolve(parse(text, "zero.titan"), Path()), strategy)


def ours(plan: Plan, rank: int, store: Any) -> tuple[Step, int]:
    """A step, and the bytes of the rank's buffers."""
    transport = ProcessGroupTransport(plan, rank, store)
    state = allocate(plan, rank)
    executable = Executable(plan, rank, transport, state, SyntheticSource(VOCAB, seed=0))
    done = 0

    def step() -> None:
        nonlocal done
        drive(executable, done)
        done += 1

    return step, sum(t.nbytes for name, t in state.buffers.items() if name[:2] in ("p.", "g.", "o."))


def formulas(plan: Plan, stage: int) -> tuple[int, int]:
    """Bytes of state, and bytes that a rank sends for parameters and gradients in a step; float32 throughout."""
    whole = sum(b.elements for b in plan.buckets)
    embedding = sum(b.elements for b in plan.buckets if b.name.startswith("embed"))
    d, m = RANKS, MICRO_BATCHES
    state = {1: 8 + 8 / d, 2: 4 + 12 / d, 3: 16 / d}[stage] * whole
    gathered = {1: whole, 2: whole, 3: 2 * m * whole - m * embedding}[stage]  # no backward reads the embedding
    reduced = {1: whole, 2: m * whole, 3: m * whole}[stage]
    return round(state), 4 * (gathered + reduced) * (d - 1) // d


class Counted:
    """Counts what goes into the process groups: gathers and scatters of more than a scalar."""

    def __init__(self) -> None:
        self.sent = 0
        for name in ("_gather", "_exchange"):
            setattr(ProcessGroupCommunicator, name, self._counting(getattr(ProcessGroupCommunicator, name)))

    def _counting(self, inner: Any) -> Any:
        def call(communicator: Any, value: Tensor, signature: Any, *rest: Any, **named: Any) -> Any:
            if signature.operation != "all_reduce":
                own = value.nbytes if inner.__name__ == "_gather" else value[0].nbytes
                self.sent += own * (communicator.size - 1)
            return inner(communicator, value, signature, *rest, **named)

        call.__name__ = inner.__name__
        return call


# --- theirs


def rope(x: Tensor) -> Tensor:
    length, width = x.shape[-2:]
    angles = torch.outer(torch.arange(length).float(), 500000.0 ** (-torch.arange(0, width, 2).float() / width))
    angles = angles.repeat(1, 2)
    turned = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1)
    return x * angles.cos() + turned * angles.sin()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(DIM, eps=1e-5), nn.RMSNorm(DIM, eps=1e-5)
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(DIM, FFN, bias=False), nn.Linear(DIM, FFN, bias=False)
        self.down = nn.Linear(FFN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.n1(x)
        q, k, v = (w(y).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for w in (self.q, self.k, self.v))
        found = F.scaled_dot_product_attention(rope(q), rope(k), v, is_causal=True)
        x = x + self.o(found.transpose(1, 2).reshape(x.shape))
        y = self.n2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.RMSNorm(DIM, eps=1e-5), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.norm(x))
        return found


def theirs(stage: int, rank: int) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Embedding(VOCAB, DIM), *(Layer() for _ in range(LAYERS)), Head())
    mesh = init_device_mesh("cpu", (RANKS,))
    for part in (*model, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=stage == 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-4, foreach=True)
    generator = torch.Generator().manual_seed(rank)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for i in range(MICRO_BATCHES):
            drawn = torch.randint(0, VOCAB, (1, SEQUENCE + 1), generator=generator)
            if stage == 1:
                model.set_requires_gradient_sync(i == MICRO_BATCHES - 1)
                model.set_reshard_after_backward(i == MICRO_BATCHES - 1)
            logits = model(drawn[:, :-1])
            (F.cross_entropy(logits.flatten(0, 1), drawn[:, 1:].flatten()) / MICRO_BATCHES).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    return step


# --- side by side


def _timed(step: Step) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _peak(make: Callable[[], Step]) -> int:
    """Most bytes alive in the second step of a fresh contender, its state included."""
    with AllStorages() as storages:
        step = make()
        step()
        storages.total = 0
        step()
    return storages.total


def _rank(rank: int, stage: int, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=RANKS)
    plan, store = plan_of(stage), dist.FileStore(f"{folder}/store", RANKS)
    counted = Counted()
    mine, held = ours(plan, rank, dist.PrefixStore("timed", store))
    peers = theirs(stage, rank)
    mine()
    counted.sent = 0
    mine()
    sent = counted.sent
    for _ in range(2):
        peers()
    times = [(_timed(mine), _timed(peers)) for _ in range(rounds)]
    peaks = (_peak(lambda: ours(plan, rank, dist.PrefixStore("peak", store))[0]), _peak(lambda: theirs(stage, rank)))
    expected = formulas(plan, stage)
    found = {"times": times, "peaks": peaks, "state": held == expected[0], "wire": sent == expected[1]}
    Path(folder, str(rank)).write_text(json.dumps(found))
    dist.barrier()


def compare(stage: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        processes.start_processes(_rank, (stage, rounds, folder), nprocs=RANKS, start_method="fork")
        ranks = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(RANKS)]
    slower = [
        [max(times) for times in zip(*both, strict=True)] for both in zip(*(r["times"] for r in ranks), strict=True)
    ]
    ratios = sorted(mine / peers for mine, peers in slower)
    peaks = [max(values) for values in zip(*(r["peaks"] for r in ranks), strict=True)]
    return {
        "step_time_ratio": round(statistics.median(ratios), 4),
        "step_time_ratio_interval": [round(ratios[len(ratios) // 4], 4), round(ratios[-1 - len(ratios) // 4], 4)],
        "step_time_s": [round(statistics.median(column), 5) for column in zip(*slower, strict=True)],
        "peak_ratio": round(peaks[0] / peaks[1], 4),
        "peak_bytes": peaks,
        "state_bytes_exact": all(r["state"] for r in ranks),
        "wire_bytes_exact": all(r["wire"] for r in ranks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    stages = {stage: compare(stage, 5 if arguments.quick else 41) for stage in STAGES}
    found: dict[str, Any] = {
        key: {f"zero{stage}": values[key] for stage, values in stages.items()}
        for key in ("step_time_ratio", "step_time_ratio_interval", "step_time_s", "peak_ratio", "peak_bytes")
    }
    for key in ("state_bytes_exact", "wire_bytes_exact"):
        found[key] = all(values[key] for values in stages.values())
    print(json.dumps(found) if arguments.json else json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
