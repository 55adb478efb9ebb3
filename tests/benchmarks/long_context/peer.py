"""The ring beside torch's context_parallel: the same model, data and ranks, a CUDA device each and NCCL between them.

context_parallel is an attention over sharded tensors for a model that one writes oneself: here that of the benchmark,
from the initial values of the plan. Both compute in bfloat16 and balance the causal mask; torch gathers keys and values
or passes them around, as it is told.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import torch.nn.functional as F
from titan.compiler.plan.program import Plan
from titan.runtime.data import SyntheticSource
from titan.runtime.drive import drive
from titan.runtime.interpreter import Executable
from titan.runtime.rehearsal import rehearse
from titan.runtime.state import allocate, fill
from titan.runtime.transport.process_group import ProcessGroupTransport
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from tests.benchmarks.long_context.model import EPSILON, HEADS, LAYERS, THETA, VOCAB, WIDTH, Form, plan

MOST = 8  # ranks
ROTATIONS = ("allgather", "alltoall")


def rotary(tokens: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all positions, float32 [tokens, WIDTH]."""
    speeds = THETA ** -(torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
    angles = torch.outer(torch.arange(tokens, dtype=torch.float64), speeds).repeat(1, 2)
    return angles.cos().float(), angles.sin().float()


def loss_sum(parameters: Mapping[str, Tensor], tokens: Tensor, labels: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Sum of the losses of tokens, int64 [1, length]; `cosine` and `sine` [length, WIDTH] are those of their places."""

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, parameters[f"{name}.weight"])

    def norm(name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], parameters[f"{name}.weight"], EPSILON)

    def rotated(x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        turned: Tensor = x * cosine + torch.cat((-right, left), -1) * sine
        return turned.to(x.dtype)

    x = F.embedding(tokens, parameters["embed.weight"])
    for number in range(LAYERS):
        name = f"layers.{number}"
        normed = norm(f"{name}.attn_norm", x)
        q, k, v = (linear(f"{name}.attn.{n}", normed).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for n in "qkv")
        mixed = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + linear(f"{name}.attn.out", mixed.transpose(1, 2).flatten(2))
        normed = norm(f"{name}.ffn_norm", x)
        x = x + linear(
            f"{name}.ffn.down", F.silu(linear(f"{name}.ffn.gate", normed)) * linear(f"{name}.ffn.up", normed)
        )
    logits = linear("head", norm("final_norm", x)).float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def peer(tokens: int, steps: int) -> dict[str, Any]:
    """Seconds of a step, bytes of tensors on a device and first loss: of ours, and of torch by both its rotations."""
    devices = torch.cuda.device_count()
    ranks = 1 << min(devices, MOST).bit_length() - 1 if devices else 0
    if ranks < 2 or not dist.is_nccl_available():
        return {"skipped": f"needs two CUDA devices, {devices} here: context_parallel has no kernel for CPUs"}
    with tempfile.TemporaryDirectory() as name:
        given = (plan(tokens, Form(ranks), precision="bf16"), tokens, steps, Path(name))
        processes.start_processes(_rank, given, nprocs=ranks, start_method="fork")
        found = [torch.load(Path(name) / f"rank{rank}", weights_only=False) for rank in range(ranks)]
    rows = {
        key: {
            "seconds": max(f[key]["seconds"] for f in found),
            "bytes": max(f[key]["bytes"] for f in found),
            "loss": found[0][key]["loss"],
        }
        for key in found[0]
    }
    return {"tokens": tokens, "ranks": ranks, **rows}


def _rank(rank: int, found: Plan, tokens: int, steps: int, folder: Path) -> None:
    device, size = torch.device("cuda", rank), found.mesh.world_size
    torch.cuda.set_device(device)
    store = FileStore(str(folder / "store"), size)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    state, source = allocate(found, rank, device, initialize=False), SyntheticSource(VOCAB, seed=3)
    rehearse(found, state, source, device)
    fill(found, state)
    parameters = {name: value.detach().clone().requires_grad_() for name, value in state.parameters.items()}
    transport = ProcessGroupTransport(found, rank, FileStore(str(folder / "ours"), size), device)
    executable = Executable(found, rank, transport, state, source)
    rows = {"ours": _measured(lambda step: float(drive(executable, step).loss), steps)}
    for rotation in ROTATIONS:
        rows[f"torch {rotation}"] = _measured(_torch(parameters, source, tokens, rotation), steps)
    torch.save(rows, folder / f"rank{rank}")
    dist.destroy_process_group()


def _measured(step: Callable[[int], float], steps: int) -> dict[str, float]:
    losses, seconds = [], []
    torch.cuda.reset_peak_memory_stats()
    for number in range(steps + 1):  # the first one warms up
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        losses.append(step(number))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {
        "seconds": statistics.median(seconds[1:]),
        "bytes": torch.cuda.max_memory_allocated(),
        "loss": losses[0],
    }


def _torch(
    parameters: Mapping[str, Tensor], source: SyntheticSource, tokens: int, rotation: str
) -> Callable[[int], float]:
    """A step of the same model under context_parallel, without the optimizer's update."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    tables = rotary(tokens)

    def step(number: int) -> float:
        set_rotate_method(rotation)
        buffers = [x.cuda() for x in (*source.load([number], 0, tokens), *tables)]
        for parameter in parameters.values():
            parameter.grad = None
        with (
            sdpa_kernel(SDPBackend.FLASH_ATTENTION),
            context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0, 0], no_restore_buffers={*buffers}),
        ):
            loss = loss_sum(parameters, *buffers) / tokens
            loss.backward()
        total = loss.detach()
        for value in (total, *(p.grad for p in parameters.values())):
            assert value is not None
            dist.all_reduce(value)
        return float(total)

    return step
