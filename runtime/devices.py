"""Which device the ranks of a machine compute on."""

from __future__ import annotations

import torch
from titan.grammar.diagnostics import Diagnostic, TitanError


def choose_device(wish: str, size: int) -> str:
    """The kind of device of `size` ranks on this machine: as wished, or `cuda` where each of them gets its own. Asked
    without starting CUDA, which would not survive a fork. Errors: T619 where `cuda` is wished and cannot be had."""
    devices, nccl = torch.cuda.device_count(), torch.distributed.is_nccl_available()
    if wish == "cuda":
        _refuse(size, devices, nccl)
    if wish != "auto":
        return wish
    return "cuda" if 0 < size <= devices and nccl else "cpu"


def _refuse(size: int, devices: int, nccl: bool) -> None:
    if size > devices:
        message = (
            f"--device cuda gives each of the {size} ranks on this machine a GPU of its own; PyTorch sees {devices}"
        )
        near = ("--device cpu", *([f"{devices} ranks"] if devices else []))
        raise TitanError(Diagnostic("T619", message, nearest=near))
    if not nccl:
        raise TitanError(Diagnostic("T619", "--device cuda needs NCCL, which this PyTorch is built without"))


def own_device(kind: str, local_rank: int) -> torch.device:
    """The device of a rank, made the current one."""
    if kind != "cuda":
        return torch.device(kind)
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
