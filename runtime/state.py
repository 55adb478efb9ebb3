"""What one rank keeps from step to step: flat buffers, and the parameters and gradients as views into them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from titan.compiler.plan.program import Bucket, Plan, Role
from titan.runtime.dtypes import DTYPES
from titan.runtime.initial import initial_value
from torch import Tensor


@dataclass(slots=True)
class Moments:
    """Optimizer state of one bucket on this rank: flat, the own shard only when the bucket is sharded."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    master: Tensor | None  # float32 parameters, kept when the bucket itself is narrower


@dataclass(slots=True)
class State:
    """One rank's buffers by their names in the plan, with views by parameter name; `updates` counts optimizer steps
    that were really taken (a step with a non-finite gradient is not)."""

    rank: int
    coordinates: dict[str, int]
    buffers: dict[str, Tensor]
    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor]
    moments: dict[str, Moments]
    updates: int = 0


def allocate(plan: Plan, rank: int, device: torch.device | str = "cpu", initialize: bool = True) -> State:
    """Buffers of the rank's role, zero but for the parameters, which get their initial values unless told otherwise
    (a checkpoint will fill them)."""
    role = plan.role_of(rank)
    buffers = {b.name: torch.zeros(b.elements, dtype=DTYPES[b.dtype], device=device) for b in role.buffers}
    state = State(rank, plan.mesh.coordinates(rank), buffers, {}, {}, {})
    for bucket in role_buckets(plan, role):
        _view(plan, bucket, state)
        if initialize:
            _fill(plan, bucket, state)
    return state


def role_buckets(plan: Plan, role: Role) -> tuple[Bucket, ...]:
    """The parameter buckets that a role's ranks hold, in the plan's order."""
    held = {buffer.name for buffer in role.buffers}
    return tuple(bucket for bucket in plan.buckets if "p." + bucket.name in held)


def own_range(plan: Plan, bucket: Bucket, coordinates: dict[str, int]) -> tuple[int, int]:
    """Elements [start, stop) of the flat bucket that this rank updates: all, or its own shard over `replicas`."""
    if not bucket.sharded:
        return 0, bucket.elements
    length = bucket.elements // plan.group_size(bucket.replicas)
    position = plan.mesh.coordinate(coordinates, bucket.replicas)
    return position * length, (position + 1) * length


def _view(plan: Plan, bucket: Bucket, state: State) -> None:
    flat, gradient = state.buffers["p." + bucket.name], state.buffers.get("g." + bucket.name)
    for parameter in plan.bucket_parameters(bucket.name):
        shape, stop = parameter.tensor.shape, parameter.offset + parameter.tensor.elements
        state.parameters[parameter.name] = flat[parameter.offset : stop].view(shape)
        if gradient is not None:
            state.gradients[parameter.name] = gradient[parameter.offset : stop].view(shape)
    packed = state.buffers.get("o." + bucket.name)
    if packed is not None:
        start, stop = own_range(plan, bucket, state.coordinates)
        parts = packed.view(-1, stop - start)
        state.moments[bucket.name] = Moments(parts[0], parts[1], parts[2] if len(parts) == 3 else None)


def _fill(plan: Plan, bucket: Bucket, state: State) -> None:
    seed = int(plan.setting("train.seed", 0))
    for parameter in plan.bucket_parameters(bucket.name):
        value = initial_value(parameter, plan.mesh, state.coordinates, seed)
        state.parameters[parameter.name].copy_(value)
    refresh_master(plan, bucket, state)


def refresh_master(plan: Plan, bucket: Bucket, state: State) -> None:
    """Set the float32 copy from the parameters (after they were filled from elsewhere)."""
    moments = state.moments.get(bucket.name)
    if moments is not None and moments.master is not None:
        start, stop = own_range(plan, bucket, state.coordinates)
        moments.master.copy_(state.buffers["p." + bucket.name][start:stop])
