"""What one rank keeps from step to step: flat buffers, and the parameters and gradients as views into them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from titan.compiler.plan.program import Bucket, Buffer, Plan, Role
from titan.runtime.dtypes import DTYPES
from titan.runtime.host import host_zeros
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
    """One rank's buffers by their names in the plan, with views by parameter name of what it holds whole; `updates`
    counts optimizer steps
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
    buffers = {b.name: _zeros(b, torch.device(device)) for b in role.buffers}
    state = State(rank, plan.mesh.coordinates(rank), buffers, {}, {}, {})
    for bucket in role_buckets(plan, role):
        _view(plan, bucket, state)
    if initialize:
        fill(plan, state)
    return state


def fill(plan: Plan, state: State) -> None:
    """Gives the parameters their initial values, and float32 copies those."""
    for bucket in role_buckets(plan, plan.role_of(state.rank)):
        _fill(plan, bucket, state)


def _zeros(buffer: Buffer, device: torch.device) -> Tensor:
    dtype = DTYPES[buffer.dtype]
    if buffer.place == "host":
        return host_zeros(buffer.elements, dtype, device)
    return torch.zeros(buffer.elements, dtype=dtype, device=device)


def role_buckets(plan: Plan, role: Role) -> tuple[Bucket, ...]:
    """The parameter buckets that a role's ranks hold, in the plan's order."""
    held = {buffer.name for buffer in role.buffers}
    return tuple(bucket for bucket in plan.buckets if "p." + bucket.name in held)


def shard_range(plan: Plan, bucket: Bucket, coordinates: dict[str, int]) -> tuple[int, int]:
    """Elements [start, stop) of the flat bucket that belong to this rank in its shard group."""
    length = bucket.elements // plan.shard_degree(bucket)
    position = plan.position(coordinates, bucket.shards) if bucket.sharded else 0
    return position * length, (position + 1) * length


def held_range(plan: Plan, bucket: Bucket, coordinates: dict[str, int], kind: str) -> tuple[int, int]:
    """Elements [start, stop) of the flat bucket that the buffer `kind` (p, g or o) of this rank holds."""
    return shard_range(plan, bucket, coordinates) if kind in bucket.sharded else (0, bucket.elements)


def own_range(plan: Plan, bucket: Bucket, coordinates: dict[str, int]) -> tuple[int, int]:
    """Elements [start, stop) of the flat bucket that this rank updates: all, or its shard."""
    return held_range(plan, bucket, coordinates, "o")


def held_slice(plan: Plan, bucket: Bucket, state: State, kind: str, start: int, stop: int) -> Tensor:
    """View of elements [start, stop) of the flat bucket in the buffer `kind` (p or g), which must hold them."""
    first, last = held_range(plan, bucket, state.coordinates, kind)
    assert first <= start <= stop <= last, f"{kind}.{bucket.name} holds [{first}, {last}), not [{start}, {stop})"
    return state.buffers[f"{kind}.{bucket.name}"][start - first : stop - first]


def views(plan: Plan, bucket: Bucket, flat: Tensor) -> dict[str, Tensor]:
    """The bucket's parameters by name as views into a whole flat tensor."""
    return {
        p.name: flat[p.offset : p.offset + p.tensor.elements].view(p.tensor.shape)
        for p in plan.bucket_parameters(bucket.name)
    }


def _view(plan: Plan, bucket: Bucket, state: State) -> None:
    """Views of what is held whole; shards have no shape."""
    if "p" not in bucket.sharded:
        state.parameters |= views(plan, bucket, state.buffers["p." + bucket.name])
    gradient = state.buffers.get("g." + bucket.name)
    if gradient is not None and "g" not in bucket.sharded:
        state.gradients |= views(plan, bucket, gradient)
    packed = state.buffers.get("o." + bucket.name)
    if packed is not None:
        start, stop = own_range(plan, bucket, state.coordinates)
        state.moments[bucket.name] = moments_of(packed, stop - start)


def moments_of(packed: Tensor, length: int) -> Moments:
    """Views into the flat optimizer state of `length` elements of a bucket."""
    parts = packed.view(-1, length)
    return Moments(parts[0], parts[1], parts[2] if len(parts) == 3 else None)


def _fill(plan: Plan, bucket: Bucket, state: State) -> None:
    seed = int(plan.setting("train.seed", 0))
    first, last = held_range(plan, bucket, state.coordinates, "p")
    for parameter in plan.bucket_parameters(bucket.name):
        begin, end = parameter.offset, parameter.offset + parameter.tensor.elements
        start, stop = max(first, begin), min(last, end)
        if start < stop:
            held = held_slice(plan, bucket, state, "p", start, stop)
            value = initial_value(parameter, plan.mesh, state.coordinates, seed, device=held.device)
            held.copy_(value.reshape(-1)[start - begin : stop - begin])
    refresh_master(plan, bucket, state)


def refresh_master(plan: Plan, bucket: Bucket, state: State) -> None:
    """Set the float32 copy from the parameters (after they were filled from elsewhere)."""
    moments = state.moments.get(bucket.name)
    if moments is not None and moments.master is not None:
        start, stop = own_range(plan, bucket, state.coordinates)
        moments.master.copy_(held_slice(plan, bucket, state, "p", start, stop))
