"""The same Llama-style model on torch's own parts, with gloo on CPU: the floor that a runtime must beat.

MODE = single | pp | tp | fsdp | ddp; SCHEDULE names a class of torch.distributed.pipelining for MODE=pp. Sizes come
from the environment (LAYERS, DIM, ...), RANK, WORLD_SIZE and the file MEET say where this process belongs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gate import serve
from torch import Tensor, nn

MODE, SCHEDULE = os.environ.get("MODE", "single"), os.environ.get("SCHEDULE", "1F1B")
SIZES = ("LAYERS", "DIM", "HEADS", "FFN", "VOCAB", "SEQ", "MB", "NMB")
LAYERS, DIM, HEADS, FFN, VOCAB, SEQ, MB, NMB = (int(os.environ[name]) for name in SIZES)
DATA_PARALLEL = MODE in ("fsdp", "ddp")
CLIP = 1.0
CPU = torch.device("cpu")


@cache
def turns(length: int, width: int) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(length).float(), 500000.0 ** (-torch.arange(0, width, 2).float() / width))
    angles = angles.repeat(1, 2)
    return angles.cos(), angles.sin()


def rope(x: Tensor) -> Tensor:
    length, width = x.shape[-2:]
    cosine, sine = turns(length, width)
    turned = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1)
    return x * cosine + turned * sine


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(DIM, eps=1e-5), nn.RMSNorm(DIM, eps=1e-5)
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(DIM, FFN, bias=False), nn.Linear(DIM, FFN, bias=False)
        self.down = nn.Linear(FFN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        y = self.n1(x)
        q, k, v = (w(y).view(batch, length, -1, DIM // HEADS).transpose(1, 2) for w in (self.q, self.k, self.v))
        found = F.scaled_dot_product_attention(rope(q), rope(k), v, is_causal=True)
        x = x + self.o(found.transpose(1, 2).reshape(batch, length, -1))
        y = self.n2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n, self.w = nn.RMSNorm(DIM, eps=1e-5), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w(self.n(x))


def layers() -> list[nn.Module]:
    torch.manual_seed(1)
    return [nn.Embedding(VOCAB, DIM), *(Layer() for _ in range(LAYERS)), Head()]


def loss_of(out: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), labels.flatten())


def chunks(counts: list[int]) -> list[nn.Sequential]:
    """The model in consecutive pieces of so many layers."""
    first, *blocks, last = layers()
    parts = [[blocks.pop(0) for _ in range(count)] for count in counts]
    parts[0].insert(0, first)
    parts[-1].append(last)
    return [nn.Sequential(*part) for part in parts]


Batch = Callable[[], tuple[Tensor, Tensor]]
Made = tuple[list[nn.Parameter], Callable[[], object]]


def batches(rank: int) -> Batch:
    generator = torch.Generator().manual_seed(rank if DATA_PARALLEL else 0)

    def batch() -> tuple[Tensor, Tensor]:
        drawn = torch.randint(0, VOCAB, (NMB * MB, SEQ + 1), generator=generator)
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()

    return batch


def pipeline(rank: int, world: int, batch: Batch) -> Made:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    kind = get_schedule_class(SCHEDULE)
    single = issubclass(kind, PipelineScheduleSingle)
    counts = [int(layers) for layers in os.environ["STAGES"].split(",")]
    count, modules = len(counts), chunks(counts)
    second = count - 1 - rank if SCHEDULE in ("ZBVZeroBubble", "DualPipeV") else rank + world
    held = [rank] if single else [rank, second]
    stages = [PipelineStage(modules[i], i, count, CPU) for i in held]
    schedule = kind(stages[0] if single else stages, NMB, loss_fn=loss_of)

    def run() -> None:
        x, y = batch()
        given = (x,) if 0 in held else ()
        wanted = {"target": y, "losses": []} if count - 1 in held else {}
        schedule.step(*given, return_outputs=False, **wanted)

    return [p for i in held for p in modules[i].parameters()], run


def sharded(model: nn.Module, world: int) -> nn.Module:
    """The model under the mode's wrapper."""
    from torch.distributed.device_mesh import init_device_mesh

    if MODE == "tp":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        plan = {}
        for i in range(1, 1 + LAYERS):
            plan |= {f"{i}.{name}": ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
            plan |= {f"{i}.{name}": RowwiseParallel() for name in ("o", "down")}
        parallelize_module(model, init_device_mesh("cpu", (world,)), plan)
    elif MODE == "fsdp":
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world,))
        for part in model.children():
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif MODE == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    return model


def accumulating(world: int, batch: Batch) -> Made:
    """One model over all micro-batches; data-parallel wrappers talk in the last one only."""
    model = sharded(nn.Sequential(*layers()), world)

    def run() -> None:
        x, y = batch()
        for i, (tokens, labels) in enumerate(zip(x.chunk(NMB), y.chunk(NMB))):
            last = i == NMB - 1
            if MODE == "fsdp":
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(last)
            elif MODE == "ddp":
                model.require_backward_grad_sync = last
            (loss_of(model(tokens), labels) / NMB).backward()

    return list(model.parameters()), run


def clipping(parameters: list[nn.Parameter]) -> Callable[[], None]:
    """Clips by the norm of the whole model's gradient, with one sum over the ranks where each holds a part."""
    kinds: dict[type, list[nn.Parameter]] = {}
    for p in parameters:
        kinds.setdefault(type(p.data), []).append(p)

    def clip() -> None:
        if MODE != "pp" and len(kinds) == 1:
            torch.nn.utils.clip_grad_norm_(parameters, CLIP, foreach=True if MODE == "ddp" else None)
            return
        squares = torch.zeros(())
        for held in kinds.values():
            norm = torch.nn.utils.get_total_norm([p.grad for p in held])
            squares += (norm.full_tensor() if hasattr(norm, "full_tensor") else norm) ** 2
        if MODE == "pp":
            dist.all_reduce(squares)
        for held in kinds.values():
            torch.nn.utils.clip_grads_with_norm_(held, CLIP, squares.sqrt())

    return clip


def main() -> None:
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method="file://" + os.environ["MEET"], rank=rank, world_size=world)
    batch = batches(rank)
    parameters, run = pipeline(rank, world, batch) if MODE == "pp" else accumulating(world, batch)
    kinds: dict[type, list[nn.Parameter]] = {}
    for p in parameters:  # foreach cannot mix plain tensors and DTensors: one group for each kind
        kinds.setdefault(type(p.data), []).append(p)
    optimizer = torch.optim.AdamW([{"params": held} for held in kinds.values()], lr=8e-4, foreach=True)
    clip = clipping(parameters)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        run()
        clip()
        optimizer.step()

    tokens = NMB * MB * SEQ * (world if DATA_PARALLEL else 1)
    serve(step, dist.barrier, tokens=tokens, parameters=sum(p.numel() for p in parameters))


if __name__ == "__main__":
    main()
