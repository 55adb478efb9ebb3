"""True positions of this rank's tokens, from the attributes of an operator or instruction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from titan.compiler.plan.mask import Run
from titan.compiler.plan.sequence import runs
from torch import Tensor


def runs_of(attributes: Mapping[str, Any], length: int) -> tuple[Run, ...]:
    """Runs (first position, length) of the `length` places from `start` on, in their order."""
    where = (int(attributes.get(name, 0)) for name in ("zigzag", "chunk"))
    return runs(int(attributes.get("start", 0)), length, *where)


def positions(found: tuple[Run, ...], device: torch.device | str = "cpu") -> Tensor:
    """Every position of some runs, int64 [length]."""
    return torch.cat([torch.arange(start, start + length, device=device) for start, length in found])
