"""Initial values of parameters: each element is a pure function of (seed, name, global element index), so that every
layout, copy and padding of a parameter starts from the same numbers."""

from __future__ import annotations

from math import prod

import torch
from titan.compiler.plan.layout import sharded_by
from titan.compiler.plan.mesh import Mesh
from titan.compiler.plan.program import Parameter
from titan.runtime.dtypes import DTYPES
from titan.runtime.random import bits, key, normal
from torch import Tensor

_CHUNK = 1 << 18  # elements drawn at once: the draws need about ten float64 temporaries of this size


def initial_value(
    parameter: Parameter,
    mesh: Mesh,
    coordinates: dict[str, int],
    seed: int,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The local piece of a parameter on the rank with these coordinates, of shape `parameter.tensor.shape`.

    Rows from `parameter.rows` on are padding and stay zero. `dtype` overrides the parameter's own (for master copies).
    Raises ValueError for an initializer that is not known.
    """
    kind, _, argument = parameter.initializer.partition(":")
    shape, starts = parameter.tensor.shape, first_elements(parameter, mesh, coordinates)
    value = torch.zeros(shape, dtype=dtype or DTYPES[parameter.tensor.dtype], device=device)
    rows = max(0, min(shape[0], parameter.rows - starts[0]))
    if kind == "ones":
        value[:rows] = 1.0
    elif kind in ("normal", "power_of_two"):
        stream = key(seed, "initial", parameter.name)
        scale = float(argument or 1.0)
        step = max(1, (_CHUNK if value.device.type == "cpu" else _CHUNK << 4) // prod(shape[1:]))
        draw = _normal if kind == "normal" else _powers
        for first in range(0, rows, step):
            last = min(rows, first + step)
            value[first:last] = draw(stream, _indices(parameter, starts, first, last, device), scale)
    elif kind != "zeros":
        raise ValueError(f"parameter {parameter.name} has the initializer {parameter.initializer}, which is not known")
    return value


def first_elements(parameter: Parameter, mesh: Mesh, coordinates: dict[str, int]) -> tuple[int, ...]:
    """First global index of the local piece along each dim; several factors on one dim count outer then inner."""
    starts = []
    for dim, size in enumerate(parameter.tensor.shape):
        position = 0
        for factor in sharded_by(parameter.tensor.layout, dim):
            position = position * mesh.size(factor) + mesh.coordinate(coordinates, factor)
        starts.append(position * size)
    return tuple(starts)


def _indices(
    parameter: Parameter, starts: tuple[int, ...], first: int, last: int, device: torch.device | str
) -> Tensor:
    """Global element numbers of the local rows [first, last); padding adds rows only, so it never changes a number."""
    shape = (last - first, *parameter.tensor.shape[1:])
    index = torch.zeros((1,) * len(shape), dtype=torch.int64, device=device)
    for dim, size in enumerate(shape):
        start = starts[dim] + (first if dim == 0 else 0)
        along = torch.arange(start, start + size, device=device) * prod(parameter.shape[dim + 1 :])
        index = index + along.view((-1,) + (1,) * (len(shape) - dim - 1))
    return index


def _normal(stream: int, index: Tensor, scale: float) -> Tensor:
    return normal(stream, index).mul_(scale)


def _powers(stream: int, index: Tensor, scale: float) -> Tensor:
    """-1, -1/2, 1/2 or 1 times `scale`: with a power of two as scale, short sums of products are exact."""
    word = bits(stream, index)
    size = torch.where(word < 0, 1.0, 0.5) * scale
    return torch.where((word & 1) == 1, size, -size)
