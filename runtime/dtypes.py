"""The plan's dtype names as torch dtypes."""

from __future__ import annotations

import torch

DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "f64": torch.float64,
    "i64": torch.int64,
    "i32": torch.int32,
    "u8": torch.uint8,
}


def statistics(dtype: torch.dtype) -> torch.dtype:
    """Statistics, losses and gradients are kept in float32, or float64 in a float64 run."""
    return torch.float64 if dtype == torch.float64 else torch.float32
